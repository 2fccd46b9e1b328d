"""The snapshotter without Spark: its configuration, and how it decodes records."""

from streamfold.extras import check_installed, needing_extra

with needing_extra("spark"):
    import pyarrow as pyarrow
# Only its metrics need this one, and every process of Spark would pay for the import.
check_installed("prometheus_client", "spark")
