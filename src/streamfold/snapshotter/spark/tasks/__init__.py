"""What runs in Spark tasks: decode, net changes, fold, and how results come back."""
