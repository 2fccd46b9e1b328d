"""The Durable Streams protocol, with snapshots, retention and bootstrap."""
