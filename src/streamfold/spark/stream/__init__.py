"""`format("streamfold")`: streams as Spark tables, and the client that they use."""
