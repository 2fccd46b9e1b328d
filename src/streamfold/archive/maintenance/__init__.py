"""Keeping archives in order: garbage collection, export, listing and verification."""
