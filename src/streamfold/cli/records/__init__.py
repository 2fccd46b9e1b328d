"""Commands for records: append, read, tail, check-tail, trim, fence, copy and bench."""
