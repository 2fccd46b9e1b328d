"""Stream clients: the protocol, its implementations, and reads that survive disconnects."""
