"""Yjs documents on Streamfold, over the Durable Streams Yjs protocol."""

from streamfold_yjs.gateway import make_app

__all__ = ["make_app"]
