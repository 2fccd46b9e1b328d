"""Streamfold: a durable stream store that knows about snapshots."""

__version__ = "0.1.0"
