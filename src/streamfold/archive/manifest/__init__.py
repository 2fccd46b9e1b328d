"""An archive's manifest: its model, its JSON, its rules, and the updates that change it."""
