"""Verbs on basins, streams, access tokens and usage."""
