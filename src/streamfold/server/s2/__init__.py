"""The S2 v1 face: serves S2 clients from the store."""
