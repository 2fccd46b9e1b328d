"""One configuration model for file, environment and flags."""
