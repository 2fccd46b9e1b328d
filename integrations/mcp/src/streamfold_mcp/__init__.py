"""Streams and archives for MCP assistants, on Streamfold or any S2 endpoint."""

from streamfold_mcp.server import make_server

__all__ = ["make_server"]
