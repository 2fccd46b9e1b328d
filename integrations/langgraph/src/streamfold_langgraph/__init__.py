"""LangGraph checkpoints as deltas in a stream, on Streamfold or any S2 endpoint."""

from streamfold_langgraph.errors import ThreadConflictError, ThreadDeletingError
from streamfold_langgraph.saver import StreamfoldSaver

__all__ = ["StreamfoldSaver", "ThreadConflictError", "ThreadDeletingError"]
