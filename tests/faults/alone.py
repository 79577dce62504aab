"""Import this first: Ray reads its environment when it is imported. The cluster is one's own, on loopback."""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
