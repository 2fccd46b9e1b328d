"""Blobs as files under one folder that survive a power cut."""
