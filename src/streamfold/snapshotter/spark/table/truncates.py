"""Finds records that empty a table: a repeated copy begins with one, and nothing before it matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.errors import SchemaIncompatibleError
from streamfold.snapshotter.decoding.decoder import ChangeDecoder, Decoded
from streamfold.snapshotter.spark.table.arrivals import COLUMNS
from streamfold.spark.stream.client import Endpoint, answer_timeout
from streamfold.spark.stream.range_reads import Range, Wanted, read_range
from streamfold.spark.stream.rows import arrow_schema, record_batch


def first_truncate(
    endpoint: Endpoint, wanted: Range, decoder: ChangeDecoder, give_up: Callable[[], bool]
) -> int | None:
    """Return the first record in the range that empties the table; None if none does.

    Reads the range piece by piece, in the memory of one, and returns None between two of them if
    `give_up` says so.
    """
    schema, timeout = arrow_schema(COLUMNS), answer_timeout(endpoint)
    for columns in read_range(endpoint, wanted, Wanted(), io_timeout=timeout):
        for decoded in _decoded(record_batch(wanted.stream, columns, schema), decoder):
            changes = decoded.changes
            truncates = changes["seq_num"].filter(pc.equal(changes["op"], "truncate"))
            if len(truncates):
                return int(truncates[0].as_py())
        if give_up():
            return None
    return None


def _decoded(records: pa.RecordBatch, decoder: ChangeDecoder) -> Iterator[Decoded]:
    """Decode records by themselves: what the table has so far may be what they do not fit."""
    try:
        yield decoder.decode(records, None)
    except SchemaIncompatibleError:
        # Each alone fits the columns that it shows.
        for row in range(len(records)):
            yield decoder.decode(records.take(pa.array([row])), None)
