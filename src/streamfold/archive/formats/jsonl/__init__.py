"""JSON Lines: text that any language parses."""
