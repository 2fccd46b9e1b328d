"""Archive maintenance: garbage collection, export, listing and verification."""
