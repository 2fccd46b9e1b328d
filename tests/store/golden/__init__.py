"""Stores written by former versions, one folder per format, and their contents."""
