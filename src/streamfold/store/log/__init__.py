"""The append path: one stream's log in memory, group commit, and what wakes its followers."""
