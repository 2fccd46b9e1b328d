"""A thread: its checkpoints and pending writes in every namespace, as a fold of events.

An event is one storage request to a saver. Folding the same events in the same order gives the same
thread everywhere, so blobs refer to each other by number.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from streamfold_langgraph.values import Blob, Chain


class Write(msgspec.Struct, frozen=True, array_like=True):
    """A pending write of a task."""

    channel: str
    task_path: str
    value: Blob


class StoredCheckpoint(msgspec.Struct, array_like=True):
    """A checkpoint, with its values by reference."""

    parent: str | None
    #: Rank among all of the thread's checkpoints. The stream decides which is newer, not clocks.
    order: int
    #: Number of its body, which is everything but the values, in the namespace's chain of bodies.
    body: int
    metadata: Blob
    #: By channel, the number of its value in the channel's chain.
    values: dict[str, int]


class Namespace(msgspec.Struct, array_like=True):
    """The checkpoints of one graph: the root graph's name is empty, subgraphs have names."""

    #: By id, oldest first.
    checkpoints: dict[str, StoredCheckpoint] = {}
    #: By checkpoint id, task and index of the write.
    writes: dict[str, dict[str, dict[int, Write]]] = {}
    bodies: Chain = msgspec.field(default_factory=Chain)
    channels: dict[str, Chain] = {}

    @property
    def newest(self) -> str | None:
        """Id of the checkpoint that was stored last."""
        return next(reversed(self.checkpoints), None)

    def chain(self, channel: str) -> Chain:
        """Return a channel's versions. Empty before its first."""
        return self.channels.get(channel) or Chain()

    def drop(self, ids: Iterable[str]) -> None:
        """Remove checkpoints with their writes, and the values that nothing else needs."""
        for checkpoint_id in ids:
            self.checkpoints.pop(checkpoint_id, None)
            self.writes.pop(checkpoint_id, None)
        kept = self.checkpoints.values()
        self.bodies.keep({stored.body for stored in kept})
        needed: dict[str, set[int]] = {channel: set() for channel in self.channels}
        for stored in kept:
            for channel, number in stored.values.items():
                needed[channel].add(number)
        for write in self.all_writes():
            if write.value.base is not None:
                needed[write.channel].add(write.value.base)
        for channel, numbers in needed.items():
            self.channels[channel].keep(numbers)
            if not self.channels[channel].blobs:
                del self.channels[channel]

    def all_writes(self) -> Iterable[Write]:
        for tasks in self.writes.values():
            for writes in tasks.values():
                yield from writes.values()


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """A checkpoint. Each value is new, or the number of one that its channel already has."""

    namespace: str
    id: str
    parent: str | None
    body: Blob
    metadata: Blob
    values: dict[str, Blob | int]


class PutWrites(msgspec.Struct, frozen=True, array_like=True, tag="writes"):
    """One task's writes. Writes with an index below 0 replace earlier ones, others never do."""

    namespace: str
    checkpoint_id: str
    task_id: str
    writes: dict[int, Write]


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Ids of removed checkpoints, by namespace."""

    checkpoints: dict[str, list[str]]


class Thread(msgspec.Struct):
    """The whole stored state of a thread."""

    #: Chosen by the writer of the first record: a deleted and restarted thread has another one.
    incarnation: str = ""
    namespaces: dict[str, Namespace] = {}
    #: Number of checkpoints so far.
    count: int = 0
    #: Parts received of an event that exceeds one record, and that event's id.
    parts: list[bytes] = []
    parts_of: str = ""

    def namespace(self, name: str) -> Namespace:
        return self.namespaces.get(name) or Namespace()

    def size(self) -> int:
        """Bytes of all values."""
        return sum(
            len(blob.data)
            for namespace in self.namespaces.values()
            for chain in (namespace.bodies, *namespace.channels.values())
            for blob in chain.blobs.values()
        )

    def apply(self, event: Event) -> None:
        """Fold one event."""
        match event:
            case Put():
                self._put(event)
            case PutWrites():
                self._put_writes(event)
            case Drop():
                for name, ids in event.checkpoints.items():
                    self.namespace(name).drop(ids)
            case Copied():
                self.namespaces, self.count = event.namespaces, event.count

    def _put(self, event: Put) -> None:
        namespace = self.namespaces.setdefault(event.namespace, Namespace())
        values = {}
        for channel, value in event.values.items():
            if isinstance(value, Blob):
                value = namespace.channels.setdefault(channel, Chain()).add(value)
            values[channel] = value
        body = namespace.bodies.add(event.body)
        namespace.checkpoints[event.id] = StoredCheckpoint(
            event.parent, self.count, body, event.metadata, values
        )
        self.count += 1

    def _put_writes(self, event: PutWrites) -> None:
        namespace = self.namespaces.setdefault(event.namespace, Namespace())
        tasks = namespace.writes.setdefault(event.checkpoint_id, {})
        writes = tasks.setdefault(event.task_id, {})
        for index, write in event.writes.items():
            if index < 0 or index not in writes:
                writes[index] = write


class Copied(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """Another thread's whole content: the first event of its copy."""

    namespaces: dict[str, Namespace]
    count: int


Event = Put | PutWrites | Drop | Copied
