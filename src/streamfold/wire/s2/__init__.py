"""The S2 v1 protocol: JSON, protobuf, s2s frames and server-sent events."""
