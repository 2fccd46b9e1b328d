"""Verbs on records: append, read, trim, fence, copy."""
