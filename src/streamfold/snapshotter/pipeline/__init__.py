"""Pure steps between decoded changes and archives: transactions and net changes per key."""
