"""The two protobuf formats: published messages, and typed columns."""
