"""Archive writing: parts, artifacts, the commit, and when to write a diff or a base."""
