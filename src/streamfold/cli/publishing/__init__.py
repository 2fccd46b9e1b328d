"""`streamfold publish`: runs server, ingest and snapshotter together with one command."""
