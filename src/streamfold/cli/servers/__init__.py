"""Commands that run or watch processes: `serve`, `ingest`, `snapshotter`, `mcp` and `top`."""
