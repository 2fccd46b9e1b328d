"""Rows and changes of PostgreSQL as records: by kernels, and one by one with the same result."""
