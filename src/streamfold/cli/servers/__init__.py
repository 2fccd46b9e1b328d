"""Verbs that run a process: `serve` and `snapshotter`."""
