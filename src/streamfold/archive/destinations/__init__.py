"""Archive destinations, their mirrors, addresses and credentials."""
