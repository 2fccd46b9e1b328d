"""Background work: retention, deletion, and reclaiming the space of what was deleted."""
