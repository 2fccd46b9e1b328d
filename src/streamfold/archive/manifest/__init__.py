"""The manifest of an archive: its model, its JSON, its rules, and the updates that change it."""
