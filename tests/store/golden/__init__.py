"""Data directories that former versions wrote, one folder per format, and what they hold."""
