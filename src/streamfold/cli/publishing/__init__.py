"""`streamfold publish`: server, ingest and snapshotter, run together by one command."""
