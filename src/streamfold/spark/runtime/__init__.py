"""Java, sessions, and the package that executors import."""
