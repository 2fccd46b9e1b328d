"""For operators: health, readiness, metrics, and the front page."""
