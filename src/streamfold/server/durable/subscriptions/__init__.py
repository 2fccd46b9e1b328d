"""Subscriptions of Durable Streams: workers are woken by webhook, or by a stream of wakes."""

from streamfold.server.durable.subscriptions.face import CONTROL_ROOT, Subscriptions

__all__ = ["CONTROL_ROOT", "Subscriptions"]
