"""What the snapshot writer knows without Spark: its configuration, and what records mean."""
