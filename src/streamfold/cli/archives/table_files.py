"""Tables and changes written to a file or to standard output, batch by batch.

Applying the lines in order yields the table: rows that replace it come as a TRUNCATE followed by
INSERTs.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import msgspec

from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.output import Output
from streamfold.errors import InvalidError

if TYPE_CHECKING:
    import pyarrow as pa

    from streamfold.archive import Changes, Rows, TableSchema

#: By a file's extension.
KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".csv": "csv", ".arrow": "arrow"}

Write = Callable[["pa.RecordBatch"], None]
TRUNCATE = b'{"action":"TRUNCATE"}'


class Lines:
    """Standard output as a sink of lines."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, data: object) -> int:
        view = memoryview(cast("bytes", data))
        self._output.write(bytes(view))
        return view.nbytes


def kind_of(path: Path | None, given: str | None) -> str:
    """Return the kind of file that was asked for, or that the extension says."""
    if given:
        return given
    if path is None:
        return "jsonl"
    if path.suffix not in KINDS:
        raise InvalidError(
            f"{path.name!r} does not say what to write: end it in {', '.join(KINDS)}, or give "
            "--format"
        )
    return KINDS[path.suffix]


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name only when the block succeeds: never half a table."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise VerbFailedError("output", f"{path} cannot be written: {error.strerror}") from None
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o666 & ~_umask())
        draft.replace(path)
    except OSError as error:
        raise VerbFailedError("output", f"{path} cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def writer_of(kind: str, sink: BinaryIO, columns: pa.Schema) -> Iterator[Write]:
    """Yield the function that writes batches with these columns."""
    import pyarrow as pa

    if kind == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetWriter(sink, columns, compression="zstd") as parquet:
            yield parquet.write_batch
    elif kind == "arrow":
        with pa.ipc.new_file(sink, columns) as arrow:
            yield arrow.write_batch
    elif kind == "csv":
        import pyarrow.csv as pv

        try:
            with pv.CSVWriter(sink, columns) as csv:
                yield csv.write_batch
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise InvalidError(
                f"the table does not fit CSV ({error}): use another format"
            ) from None
    else:
        yield json_lines(sink, columns)


def json_lines(sink: BinaryIO, columns: pa.Schema) -> Write:
    """Return the function that writes rows as the archive's JSON Lines do, without losing digits."""
    from streamfold.archive.formats import JsonlFormat
    from streamfold.archive.schema import TableSchema

    schema = TableSchema.of(columns)

    def write(batch: pa.RecordBatch) -> None:
        JsonlFormat().write_rows(sink, schema, [batch])

    return write


class ChangePrinter:
    """Prints the rows and changes of an archive's table."""

    def __init__(self, output: Output, keys: Sequence[str]) -> None:
        self._output = output
        self._keys = tuple(keys)

    def changes(self, item: Changes) -> None:
        """Print the changes of a diff."""
        self._print(_change_lines(item.batch, self._keys), item.from_position, item.to_position)

    def rows(self, item: Rows) -> None:
        """Print rows that replace the table, or more of them."""
        if item.first:
            self._print([TRUNCATE], None, item.position)
        self._print(_row_lines(item.batch), None, item.position)

    def _print(self, lines: Sequence[bytes], start: str | None, end: str) -> None:
        if not self._output.as_json:
            self._output.write(*(line + b"\n" for line in lines))
            return
        positions = {"from_position": start, "to_position": end}
        self._output.show_objects({**positions, "change": msgspec.Raw(line)} for line in lines)


def _change_lines(batch: pa.RecordBatch, keys: Sequence[str]) -> list[bytes]:
    from streamfold.archive.formats import JsonlFormat

    schema = _schema_of(batch, keys)
    if schema is None:
        return [msgspec.json.encode(dict(_present(change))) for change in batch.to_pylist()]
    sink = io.BytesIO()
    JsonlFormat().write_changes(sink, schema, [batch])
    return sink.getvalue().splitlines()


def _row_lines(batch: pa.RecordBatch) -> list[bytes]:
    from streamfold.archive.formats import JsonlFormat
    from streamfold.archive.schema import TableSchema

    sink = io.BytesIO()
    JsonlFormat().write_rows(sink, TableSchema.of(batch.schema), [batch])
    return [b'{"action":"INSERT","new":' + line + b"}" for line in sink.getvalue().splitlines()]


def _schema_of(batch: pa.RecordBatch, keys: Sequence[str]) -> TableSchema | None:
    """Return the table's schema; None if a key has a type that schemas lack."""
    from streamfold.archive.schema import TableSchema, is_key_type

    fields = {field.name: field for field in batch.schema.field("after").type}
    if not all(name in fields and is_key_type(fields[name].type) for name in keys):
        return None
    return TableSchema.of(fields.values(), keys)


def _present(change: dict[str, object]) -> Iterator[tuple[str, object]]:
    names = {"action": "action", "key": "key", "before": "old", "after": "new"}
    for name, published in names.items():
        if change[name] is not None:
            yield published, change[name]
