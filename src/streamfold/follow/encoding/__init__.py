"""The bytes of snapshots: codecs, containers, and records in the stream."""
