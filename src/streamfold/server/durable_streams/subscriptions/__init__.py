"""Subscriptions of Durable Streams: workers are woken by webhook, or by a stream of wakes."""

from streamfold.server.durable_streams.subscriptions.routes import CONTROL_ROOT, Subscriptions

__all__ = ["CONTROL_ROOT", "Subscriptions"]
