"""Writes tables and changes to a file or to standard output, batch by batch.

Applying the lines in order yields the table: rows that replace it follow a TRUNCATE, as INSERTs.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import click
import msgspec

from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.output import Output, ProgressBar
from streamfold.errors import InvalidError

if TYPE_CHECKING:
    import pyarrow as pa

    from streamfold.archive import Changes, Rows, TableSchema

#: Writes batches with these columns to a sink. Returns the number of rows.
WriteRows = Callable[[BinaryIO, "pa.Schema", Iterable["pa.RecordBatch"]], int]
TRUNCATE = b'{"action":"TRUNCATE"}'


class Lines:
    """A sink for lines that writes to standard output."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, data: object) -> int:
        view = memoryview(cast("bytes", data))
        self._output.write(bytes(view))
        return view.nbytes


def kind_of(path: Path | None, kind: str | None) -> str:
    """Return the requested kind of file, or else the kind for the file's extension.

    The kind is an archive format, from Streamfold or an installed package, or one of `_PLAIN`.
    """
    if kind is not None:
        if not _is_kind(kind):
            raise click.UsageError(f"--format {kind!r} is unknown: choose from {_kinds()}")
        return kind
    if path is None:
        return "jsonl"
    for ending in ("".join(path.suffixes[-2:]), path.suffix):
        if _is_kind(ending[1:]):
            return ending[1:]
    raise InvalidError(
        f"{path.name!r} does not say what to write: end it in one of {_kinds('.')}, or give --format"
    )


def _is_kind(name: str) -> bool:
    from streamfold.archive.formats.format import FORMATS, parse_format_name

    return name in _PLAIN or parse_format_name(name)[0] in FORMATS


def _kinds(before: str = "") -> str:
    from streamfold.archive.formats.format import FORMATS

    return ", ".join(before + name for name in (*FORMATS.ids(), *_PLAIN))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name only when the block succeeds, so it never has half a table."""
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


async def write_table(
    kind: str, sink: BinaryIO, batches: AsyncGenerator[pa.RecordBatch], bar: ProgressBar
) -> int:
    """Write a table in a thread, batch by batch as they arrive. Returns the number of rows."""
    from streamfold.archive.engines.table_copy import in_thread

    def write(schema: pa.Schema, rows: Iterator[pa.RecordBatch]) -> int:
        return _writing(kind)(sink, schema, map(counted, rows))

    def counted(batch: pa.RecordBatch) -> pa.RecordBatch:
        bar.update(len(batch))
        return batch

    return await in_thread(batches, write)


def _writing(kind: str) -> WriteRows:
    from streamfold.archive.formats.format import format_of, parse_format_name
    from streamfold.archive.schema import TableSchema

    if kind in _PLAIN:
        return _PLAIN[kind]
    form = format_of(*parse_format_name(kind))
    return lambda sink, columns, batches: form.write_rows(sink, TableSchema.of(columns), batches)


def _write_arrow(sink: BinaryIO, columns: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    import pyarrow as pa

    with pa.ipc.new_file(sink, columns) as file:
        return _write_each(file, batches)


def _write_csv(sink: BinaryIO, columns: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    import pyarrow as pa
    import pyarrow.csv as pv

    try:
        with pv.CSVWriter(sink, columns) as file:
            return _write_each(file, batches)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise InvalidError(f"the table does not fit CSV ({error}): use another format") from None


def _write_each(file: Any, batches: Iterable[pa.RecordBatch]) -> int:
    rows = 0
    for batch in batches:
        file.write_batch(batch)
        rows += len(batch)
    return rows


#: Kinds of files that are not archive formats, by extension.
_PLAIN: Final[Mapping[str, WriteRows]] = {"csv": _write_csv, "arrow": _write_arrow}


class ChangePrinter:
    """Prints the rows and changes of an archive's table."""

    def __init__(self, output: Output, keys: Sequence[str]) -> None:
        self._output = output
        self._keys = tuple(keys)

    def changes(self, item: Changes) -> None:
        """Print a diff's changes."""
        self._print(_change_lines(item.batch, self._keys), item.from_position, item.to_position)

    def rows(self, item: Rows) -> None:
        """Print rows that replace the table, or further rows."""
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
    """Return the table's schema, or None if a key has a type that schemas lack."""
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
