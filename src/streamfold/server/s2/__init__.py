"""The S2 v1 face: requests of S2 clients, answered from the store."""
