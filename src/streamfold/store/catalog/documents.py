"""Small durable documents that callers keep beside the streams, by kind and id."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from streamfold.errors import InvalidError
from streamfold.store import keys
from streamfold.store.supervisor import Supervisor

#: Bytes; larger content belongs in a blob.
DOCUMENT_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents that are replaced as a whole; a change is durable when the call returns."""

    supervisor: Supervisor

    async def put(self, kind: str, document_id: str, content: bytes) -> None:
        if len(content) > DOCUMENT_MAX:
            raise InvalidError(
                f"{kind} {document_id!r} has {len(content)} bytes: send at most {DOCUMENT_MAX}"
            )
        mounted = await self.supervisor.mounted()
        await mounted.mount.committer.write([(keys.document(kind, document_id), content)])

    async def get(self, kind: str, document_id: str) -> bytes | None:
        mounted = await self.supervisor.mounted()
        return await mounted.mount.engine.get(keys.document(kind, document_id))

    async def delete(self, kind: str, document_id: str) -> None:
        mounted = await self.supervisor.mounted()
        await mounted.mount.committer.write([(keys.document(kind, document_id), None)])

    async def all(self, kind: str) -> dict[str, bytes]:
        """Every document of a kind, by id."""
        mounted = await self.supervisor.mounted()
        found: dict[str, bytes] = {}
        span = keys.documents_span(kind)
        async with aclosing(mounted.mount.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                found.update((keys.document_id(key), bytes(value)) for key, value in page)
        return found
