"""Archived tables in other engines: SQL by DuckDB, and tables of Delta Lake, Iceberg and DuckDB."""
