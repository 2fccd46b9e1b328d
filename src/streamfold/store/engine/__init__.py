"""The key-value engine below the store: the seam, SlateDB behind it, and where its files live."""
