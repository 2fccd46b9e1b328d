"""The append path: stream logs in memory, group commit and waking followers."""
