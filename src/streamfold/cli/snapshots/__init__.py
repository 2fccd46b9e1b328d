"""`streamfold snapshot`: commands for snapshots of a stream's state."""
