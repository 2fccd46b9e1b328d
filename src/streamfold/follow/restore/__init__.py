"""Restoring a state: plan, search, load, replay."""
