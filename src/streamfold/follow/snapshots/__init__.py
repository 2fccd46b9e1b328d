"""Stream snapshots: where they are stored, when one is due, and what takes them."""
