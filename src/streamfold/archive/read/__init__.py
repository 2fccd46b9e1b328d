"""Reading an archive: plans, files, folding, the change feed, and following a table."""
