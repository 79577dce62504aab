"""The one table of statistics and its Prometheus text (being filled in)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Values of one engine at one moment; plain data that travels between processes."""
