"""`streamfold archive`: verbs on tables published as files."""
