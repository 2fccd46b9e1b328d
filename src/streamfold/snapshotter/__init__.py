"""What the snapshot writer knows without Spark: its configuration, and what records mean."""

from streamfold.extras import needing_extra

with needing_extra("spark"):
    import prometheus_client as prometheus_client
    import pyarrow as pyarrow
