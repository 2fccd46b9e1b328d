"""PostgreSQL as a source: catalog, first copy, logical replication."""
