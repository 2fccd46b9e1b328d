"""Runs queries in a Spark that has Delta Lake's own package: a line of SQL in, a line of JSON out.

Spark fetches the package from Maven Central, as it does for users. The newest package is built for
Spark 4.2. On 4.3 it reads whole tables and versions by SQL, with `v2.enableMode`, and nothing else: see
docs/guides/read-an-archive.md.
"""

from __future__ import annotations

import json
import sys

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from streamfold.spark import local_session

SETTINGS = {
    "spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0",
    # Everything else that it needs is a part of Spark.
    "spark.jars.excludes": "org.*:*,com.*:*,io.unitycatalog:*,io.airlift:*,commons-*:*,javax.*:*",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.v2.enableMode": "STRICT",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "1",
    "spark.ui.showConsoleProgress": "false",
}


def main() -> None:
    spark = local_session("delta-queries", cores=1, quick=True, settings=SETTINGS)
    spark.sparkContext.setLogLevel("OFF")
    for query in sys.stdin:
        try:
            found = spark.sql(query).toJSON().collect()
        except (PySparkException, Py4JError) as error:
            print(json.dumps({"error": str(error)}), flush=True)
        else:
            print(json.dumps({"rows": [json.loads(row) for row in found]}), flush=True)


if __name__ == "__main__":
    main()
