"""The console: one static page that shows speculation at work, and the summary that it asks for."""

from deployments.console.files import PATHS
from deployments.console.routes import add_console

__all__ = ["PATHS", "add_console"]
