"""HTTP over the store: one port, HTTP/1.1 and HTTP/2, in the event loop of the store."""
