"""Schemas of archived tables: column types, widening, and declared types."""
