"""What the faces share about serving streams: order of appends, live reads, shared encodings."""
