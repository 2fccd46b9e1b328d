"""Commands on a store itself, past its server: check, backup, restore."""
