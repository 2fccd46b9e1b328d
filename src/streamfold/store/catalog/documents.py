"""Small durable documents, by kind and id, that callers store beside the streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from streamfold.errors import InvalidError
from streamfold.store import keys
from streamfold.store.damage import StoreDamagedError
from streamfold.store.engine.engine import TableDamagedError
from streamfold.store.supervisor import Supervisor

#: Maximum bytes of a document. Larger content belongs in a blob.
DOCUMENT_MAX = 1 << 20


class DocumentChange(NamedTuple):
    """A document's new content. None deletes the document."""

    kind: str
    document_id: str
    content: bytes | None


@dataclass(frozen=True, slots=True)
class Documents:
    """Stores documents, each replaced as a whole. A change is durable when its call returns."""

    supervisor: Supervisor

    async def put(self, kind: str, document_id: str, content: bytes) -> None:
        await self.change([DocumentChange(kind, document_id, content)])

    async def delete(self, kind: str, document_id: str) -> None:
        await self.change([DocumentChange(kind, document_id, None)])

    async def change(self, changes: Iterable[DocumentChange]) -> None:
        """Apply all changes in one commit, or none of them."""
        ops = []
        for kind, document_id, content in changes:
            if content is not None and len(content) > DOCUMENT_MAX:
                raise InvalidError(
                    f"{kind} {document_id!r} has {len(content)} bytes: send at most {DOCUMENT_MAX}"
                )
            ops.append((keys.document(kind, document_id), content))
        if ops:
            mounted = await self.supervisor.mounted()
            await mounted.mount.committer.write(ops)

    async def get(self, kind: str, document_id: str) -> bytes | None:
        mounted = await self.supervisor.mounted()
        return await mounted.mount.engine.get(keys.document(kind, document_id))

    async def scan(self, kind: str, prefix: str = "") -> AsyncGenerator[tuple[str, bytes]]:
        """Yield the id and content of every document of a kind whose id starts with `prefix`.

        After all readable documents, raises StoreDamagedError if others are unreadable.
        """
        mount = (await self.supervisor.mounted()).mount
        start, end = keys.documents_span(kind, prefix)
        damaged: StoreDamagedError | None = None
        while start < end:
            try:
                async with aclosing(mount.engine.scan(start, end, first=100)) as pages:
                    async for page in pages:
                        for key, value in page:
                            yield keys.document_id(key), bytes(value)
                break
            except TableDamagedError as error:
                effect = f"documents of kind {kind!r} cannot all be read"
                damaged, start = mount.damage.note_row(effect, error), error.span.end
        if damaged is not None:
            raise damaged

    async def all(self, kind: str) -> dict[str, bytes]:
        """Return all documents of a kind, by id."""
        async with aclosing(self.scan(kind)) as documents:
            return {document_id: content async for document_id, content in documents}
