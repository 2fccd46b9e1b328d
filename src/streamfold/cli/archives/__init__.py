"""`streamfold archive`: commands for tables published as files."""
