"""The face of Durable Streams, with snapshots, retention and bootstrap."""
