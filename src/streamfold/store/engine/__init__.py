"""The key-value engine below the store: its interface, SlateDB, and storage locations."""
