"""Snapshots of a stream: where they are kept, when one is due, and what takes them."""
