"""The event sinks that ship with Streamfold, and how one is opened from its configuration."""
