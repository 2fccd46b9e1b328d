"""The work of Spark tasks: decode, net changes, fold, and how results return to the driver."""
