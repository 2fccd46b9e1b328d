"""The Durable Streams face, with snapshots, retention and bootstrap."""
