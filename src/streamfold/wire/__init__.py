"""Protocols without I/O: bytes in, values out. Nothing here opens a socket or touches storage."""
