"""Stores a subscription as a document, and a row for each link.

A change writes only the rows that it affects, in one commit, because a subscription may have ten
thousand links and most changes affect one. Earlier versions kept the links in the document. Such a
document is read as it is, and its next change moves the links to rows.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Final

import msgspec
from msgspec.structs import replace

from streamfold.errors import DataCorruptError
from streamfold.server.durable_streams.subscriptions.fairness import TimeSlice
from streamfold.server.durable_streams.subscriptions.leases import Link, Subscription
from streamfold.store.catalog.documents import DocumentChange, Documents
from streamfold.undecodable import UNDECODABLE

logger = logging.getLogger(__name__)

_SUBSCRIPTIONS: Final = msgspec.msgpack.Decoder(Subscription)
_LINKS: Final = msgspec.msgpack.Decoder(Link)
_ENCODER: Final = msgspec.msgpack.Encoder()


class StoredSubscription:
    """The stored data of one subscription. Only one caller at a time may read or change it."""

    def __init__(
        self, documents: Documents, basin: str, id_: str, time_slice: Callable[[], TimeSlice]
    ) -> None:
        self._documents = documents
        self._id = id_
        self._kind, self._link_kind = _kinds(basin)
        self._time_slice = time_slice
        #: The stored document and link rows, as of the last successful call.
        self._document: bytes | None = None
        self._rows: Mapping[str, Link] = {}

    async def read(self) -> Subscription | None:
        """Read the subscription. Returns None if it does not exist."""
        document = await self._documents.get(self._kind, self._id)
        if document is None:
            self._document, self._rows = None, {}
            return None
        rows, prefix = dict[str, Link](), _row_id(self._id, "")
        async with aclosing(self._documents.scan(self._link_kind, prefix)) as links:
            async for row_id, content in links:
                rows[row_id.removeprefix(prefix)] = _decode_link(row_id, content)
        return self.adopt(document, rows)

    async def write(self, state: Subscription) -> None:
        """Make `state` durable atomically."""
        document = _ENCODER.encode(replace(state, links={}))
        changes, time_slice = list[DocumentChange](), self._time_slice()
        if document != self._document:
            changes.append(DocumentChange(self._kind, self._id, document))
        for path in [
            path for path, link in state.links.items() if self._rows.get(path) is not link
        ]:
            changes.append(self._change(path, _ENCODER.encode(state.links[path])))
            await time_slice.step()
        for path in self._rows.keys() - state.links.keys():
            changes.append(self._change(path, None))
            await time_slice.step()
        await self._documents.change(changes)
        self._document, self._rows = document, state.links

    async def erase(self) -> None:
        """Delete the subscription."""
        document = DocumentChange(self._kind, self._id, None)
        await self._documents.change([document, *(self._change(path, None) for path in self._rows)])
        self._document, self._rows = None, {}

    def _change(self, path: str, content: bytes | None) -> DocumentChange:
        return DocumentChange(self._link_kind, _row_id(self._id, path), content)

    def adopt(self, document: bytes, rows: dict[str, Link]) -> Subscription:
        """Return the subscription whose document and rows have just been read."""
        self._document, self._rows = document, rows
        state = _decode_document(self._id, document)
        # Links are in the document or in rows, never in both.
        return replace(state, links=rows) if rows else state


async def load_subscriptions(
    documents: Documents, basin: str, time_slice: Callable[[], TimeSlice]
) -> AsyncIterator[tuple[str, StoredSubscription, Subscription]]:
    """Yield every subscription of a basin: its id, its stored data and its state."""
    kind, link_kind = _kinds(basin)
    rows: dict[str, dict[str, Link]] = {}
    async with aclosing(documents.scan(link_kind)) as links:
        async for row_id, content in links:
            id_, _, path = row_id.partition("\0")
            rows.setdefault(id_, {})[path] = _decode_link(row_id, content)
    for id_, document in (await documents.all(kind)).items():
        stored = StoredSubscription(documents, basin, id_, time_slice)
        yield id_, stored, stored.adopt(document, rows.pop(id_, {}))
    for id_ in rows:
        logger.warning("links of subscription %r have no subscription: they are ignored", id_)


def check_document(kind: str, document_id: str, content: bytes) -> None:
    """Raise DataCorruptError if the document is a damaged subscription or link."""
    subscriptions, links = _kinds("")
    if kind.startswith(subscriptions):
        _decode_document(document_id, content)
    elif kind.startswith(links):
        _decode_link(document_id, content)


def _kinds(basin: str) -> tuple[str, str]:
    """Return the document kinds of a basin's subscriptions and of their links."""
    return f"ds-subscription/{basin}", f"ds-subscription-link/{basin}"


def _row_id(id_: str, path: str) -> str:
    """Return the id of a link's row. Neither part contains NUL."""
    return f"{id_}\0{path}"


def _decode_document(id_: str, content: bytes) -> Subscription:
    try:
        return _SUBSCRIPTIONS.decode(content)
    except UNDECODABLE as error:
        raise DataCorruptError(f"subscription {id_!r} cannot be read: {error}") from error


def _decode_link(row_id: str, content: bytes) -> Link:
    try:
        return _LINKS.decode(content)
    except UNDECODABLE as error:
        raise DataCorruptError(
            f"link {row_id!r} of a subscription cannot be read: {error}"
        ) from error
