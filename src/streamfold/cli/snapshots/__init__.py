"""`streamfold snapshot`: verbs on snapshots of a stream's state."""
