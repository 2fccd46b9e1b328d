"""Tables written to a file, or to standard output, batch by batch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.output import Output
from streamfold.errors import InvalidError

if TYPE_CHECKING:
    import pyarrow as pa

#: By a file's extension.
KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".csv": "csv", ".arrow": "arrow"}

Write = Callable[["pa.RecordBatch"], None]


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
