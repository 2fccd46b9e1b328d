"""Frozen data that every layer shares: names, positions, records, configurations."""
