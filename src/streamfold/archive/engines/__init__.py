"""Archived tables in other engines: SQL by DuckDB, and Delta Lake, Iceberg and DuckDB tables."""
