"""Snapshots of a stream: where they are kept, when one is due, and who takes them."""
