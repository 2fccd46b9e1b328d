"""Commands that run a process: `serve` and `snapshotter`."""
