"""Maps columns of an archive to Spark's types without loss, at any depth.

If Spark lacks a type, the next one that holds all values is used: unsigned integers become the next
wider type, 64-bit ones a decimal; nanoseconds and times of day a bigint in their own unit; decimals of
more than 38 digits text, and so do columns that have held no value yet.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from streamfold.archive.schema.column_types import is_decimal

#: The most digits of a decimal in Spark.
DECIMAL_DIGITS = 38

_PLAIN: dict[pa.DataType, spark.DataType] = {
    # Spark's files have no type for columns without values.
    pa.null(): spark.StringType(),
    pa.bool_(): spark.BooleanType(),
    pa.int8(): spark.ByteType(),
    pa.int16(): spark.ShortType(),
    pa.int32(): spark.IntegerType(),
    pa.int64(): spark.LongType(),
    pa.uint8(): spark.ShortType(),
    pa.uint16(): spark.IntegerType(),
    pa.uint32(): spark.LongType(),
    pa.uint64(): spark.DecimalType(20, 0),
    pa.float32(): spark.FloatType(),
    pa.float64(): spark.DoubleType(),
    pa.string(): spark.StringType(),
    pa.binary(): spark.BinaryType(),
    pa.date32(): spark.DateType(),
    # Spark has times of day only if a setting enables them.
    pa.time64("us"): spark.LongType(),
    pa.time64("ns"): spark.LongType(),
}


def spark_schema(fields: Iterable[pa.Field]) -> spark.StructType:
    """Return the columns in Spark's types."""
    return spark.StructType(
        [spark.StructField(f.name, spark_type(f.type), f.nullable) for f in fields]
    )


def arrow_schema(schema: spark.StructType) -> pa.Schema:
    """Return the Arrow columns that Spark takes without conversion."""
    return to_arrow_schema(schema, timezone="UTC")


def spark_type(kind: pa.DataType) -> spark.DataType:
    """Return the type that holds every value of an archive's type."""
    types = pa.types
    if kind in _PLAIN:
        return _PLAIN[kind]
    if types.is_timestamp(kind):
        if kind.unit != "us":
            return spark.LongType()
        return spark.TimestampType() if kind.tz else spark.TimestampNTZType()
    if is_decimal(kind):
        fits = kind.precision <= DECIMAL_DIGITS
        return spark.DecimalType(kind.precision, kind.scale) if fits else spark.StringType()
    if types.is_struct(kind):
        return spark_schema(kind)
    if types.is_map(kind):
        item = kind.item_field
        return spark.MapType(spark.StringType(), spark_type(item.type), item.nullable)
    item = kind.value_field
    return spark.ArrayType(spark_type(item.type), item.nullable)


def loosened(kind: spark.DataType) -> spark.DataType:
    """Return the type with everything in it nullable, as in types written as text."""
    if isinstance(kind, spark.StructType):
        return spark.StructType(
            [spark.StructField(f.name, loosened(f.dataType)) for f in kind.fields]
        )
    if isinstance(kind, spark.MapType):
        return spark.MapType(kind.keyType, loosened(kind.valueType))
    return (
        spark.ArrayType(loosened(kind.elementType)) if isinstance(kind, spark.ArrayType) else kind
    )
