"""The snapshotter's configuration and decoders; Spark is in its own package."""

from streamfold.extras import check_installed

# Checked, not imported: every Spark process would pay for the import.
for _package in ("pyarrow", "prometheus_client"):
    check_installed(_package, "spark")
