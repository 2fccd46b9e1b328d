"""Codec for Arrow tables: an IPC stream, batch by batch. Needs the extra `archive`."""

from __future__ import annotations

import io
from collections.abc import Iterator

from streamfold.extras import needing_extra

with needing_extra("archive"):
    import pyarrow as pa


class ArrowCodec:
    """Codec for Arrow tables. Encoding and decoding hold at most one record batch in two copies."""

    name = "arrow"

    def __init__(self, rows_per_batch: int = 65_536) -> None:
        self._rows = rows_per_batch

    def encode(self, state: pa.Table) -> Iterator[bytes]:
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, state.schema) as writer:
            for batch in state.to_batches(max_chunksize=self._rows):
                writer.write_batch(batch)
                yield _drain(sink)
        yield _drain(sink)

    def decode(self, pieces: Iterator[bytes]) -> pa.Table:
        with pa.ipc.open_stream(pa.PythonFile(PieceFile(pieces), mode="r")) as reader:
            return reader.read_all()


class PieceFile(io.RawIOBase):
    """A sequential, read-only file over an iterator of byte pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        content = io.BytesIO()
        while size < 0 or content.tell() < size:
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._rest = memoryview(piece)
            step = len(self._rest) if size < 0 else size - content.tell()
            content.write(self._rest[:step])
            self._rest = self._rest[step:]
        return content.getvalue()


def _drain(sink: io.BytesIO) -> bytes:
    data = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return data
