"""The console: a web page that shows and changes what the server holds, through its public APIs."""

from streamfold.server.console.pages import ConsoleSettings, add_console

__all__ = ["ConsoleSettings", "add_console"]
