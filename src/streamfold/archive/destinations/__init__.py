"""Where archives live: destinations, their mirrors, addresses and credentials."""
