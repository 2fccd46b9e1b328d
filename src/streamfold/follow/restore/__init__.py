"""Restoring state: plan, search, load, replay."""
