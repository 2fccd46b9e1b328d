"""What the snapshot writer knows without Spark: its configuration, and what records mean."""

from streamfold.extras import check_installed, needing_extra

with needing_extra("spark"):
    import pyarrow as pyarrow
# Only its metrics need this one, and every process of Spark would pay for the import.
check_installed("prometheus_client", "spark")
