"""The console: a web page that shows and changes the server's content through its public APIs."""

from streamfold.server.console.history import HistoryHandler, MetricsHistory
from streamfold.server.console.pages import ConsoleSettings, add_console
from streamfold.server.console.servers import ThisServer

__all__ = ["ConsoleSettings", "HistoryHandler", "MetricsHistory", "ThisServer", "add_console"]
