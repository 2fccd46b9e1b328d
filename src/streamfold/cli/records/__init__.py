"""Commands for records: append, read, trim, fence, copy."""
