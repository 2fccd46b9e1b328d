"""Durable Streams subscriptions, which wake workers by webhook or through a wake stream."""

from streamfold.server.durable_streams.subscriptions.routes import CONTROL_ROOT, Subscriptions

__all__ = ["CONTROL_ROOT", "Subscriptions"]
