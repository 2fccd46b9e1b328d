"""Snapshot encoding: codecs, containers, and records in the stream."""
