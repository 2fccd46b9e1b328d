"""Archive reading: plans, files, folding, the change feed, and following a table."""
