"""Conversion between LangGraph's values and a thread's stored form. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    PendingWrite,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from streamfold_langgraph.thread import Namespace, Put, PutWrites, StoredCheckpoint, Thread, Write
from streamfold_langgraph.values import Blob, Chain, DecodedValues, pack, unpack


class Checkpoints:
    """LangGraph's view of one namespace of a thread."""

    def __init__(
        self,
        thread_id: str,
        name: str,
        thread: Thread,
        serde: SerializerProtocol,
        decoded: DecodedValues,
    ) -> None:
        self._thread_id, self._name = thread_id, name
        self._incarnation = thread.incarnation
        self.stored: Namespace = thread.namespace(name)
        self._serde, self._decoded = serde, decoded

    def read(self, checkpoint_id: str) -> CheckpointTuple | None:
        """Return a checkpoint with its values and pending writes, or None if the id is unknown."""
        stored = self.stored.checkpoints.get(checkpoint_id)
        if stored is None:
            return None
        checkpoint = self._body(stored)
        checkpoint["channel_values"] = {
            channel: self._load(channel, self.stored.chain(channel), number)
            for channel, number in stored.values.items()
        }
        return CheckpointTuple(
            self.config(checkpoint_id),
            checkpoint,
            self.metadata(stored),
            self.config(stored.parent) if stored.parent else None,
            self.writes(checkpoint_id),
        )

    def config(self, checkpoint_id: str) -> RunnableConfig:
        """Return the config that names a checkpoint."""
        return {
            "configurable": {
                "thread_id": self._thread_id,
                "checkpoint_ns": self._name,
                "checkpoint_id": checkpoint_id,
            }
        }

    def metadata(self, stored: StoredCheckpoint) -> CheckpointMetadata:
        blob = stored.metadata
        return cast("CheckpointMetadata", self._serde.loads_typed((blob.type, blob.data)))

    def writes(self, checkpoint_id: str) -> list[PendingWrite]:
        """Return a checkpoint's pending writes in the order in which a run applies them."""
        found = [
            (writes_sort_key(write.task_path, task_id, index), task_id, write)
            for task_id, writes in self.stored.writes.get(checkpoint_id, {}).items()
            for index, write in writes.items()
        ]
        found.sort(key=lambda entry: entry[0])
        return [(task_id, write.channel, self._load_write(write)) for _, task_id, write in found]

    def put(
        self,
        parent: str | None,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> Put:
        """Return the event that stores a checkpoint, without values that its parent has."""
        known = self.stored.checkpoints.get(parent or "")
        versions: ChannelVersions = self._body(known)["channel_versions"] if known else {}
        values: dict[str, Blob | int] = {}
        for channel, value in checkpoint["channel_values"].items():
            version = checkpoint["channel_versions"].get(channel)
            if (
                known is not None
                and channel in known.values
                and channel not in new_versions
                and version is not None
                and versions.get(channel) == version
            ):
                values[channel] = known.values[channel]
            else:
                values[channel] = self._pack(channel, self.stored.chain(channel), value)
        body = {name: part for name, part in checkpoint.items() if name != "channel_values"}
        return Put(
            self._name,
            checkpoint["id"],
            parent,
            self._pack(None, self.stored.bodies, body),
            Blob(*self._serde.dumps_typed(metadata)),
            values,
        )

    def put_writes(
        self, checkpoint_id: str, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> PutWrites | None:
        """Return the event that stores a task's writes, or None if it would change nothing."""
        stored = self.stored.writes.get(checkpoint_id, {}).get(task_id, {})
        new = {}
        for position, (channel, value) in enumerate(writes):
            index = WRITES_IDX_MAP.get(channel, position)
            if index < 0 or index not in stored:
                new[index] = Write(channel, task_path, self._pack_write(channel, value))
        return PutWrites(self._name, checkpoint_id, task_id, new) if new else None

    def prunable(self) -> list[str]:
        """Return all checkpoints but the newest and the ancestors that its delta channels need."""
        kept = self.stored.newest
        needed: set[str] = set()
        open_channels: set[str] | None = None
        while kept is not None and (stored := self.stored.checkpoints.get(kept)) is not None:
            needed.add(kept)
            if open_channels is None:
                open_channels = set(self.metadata(stored).get("counters_since_delta_snapshot", ()))
            open_channels -= stored.values.keys()
            if not open_channels:
                break
            kept = stored.parent
        return [
            checkpoint_id
            for checkpoint_id in self.stored.checkpoints
            if checkpoint_id not in needed
        ]

    def delta_history(
        self, checkpoint_id: str | None, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return each channel's writes since the nearest ancestor with a value, and that value."""
        writes: dict[str, list[list[PendingWrite]]] = {channel: [] for channel in channels}
        seeds: dict[str, Any] = {}
        target = self.stored.checkpoints.get(checkpoint_id or self.stored.newest or "")
        ancestor = target.parent if target else None
        while (
            len(seeds) < len(writes)
            and (stored := self.stored.checkpoints.get(ancestor or "")) is not None
        ):
            pending = self.writes(ancestor or "")
            for channel in writes.keys() - seeds.keys():
                writes[channel].append([write for write in pending if write[1] == channel])
                if channel in stored.values:
                    chain = self.stored.chain(channel)
                    seeds[channel] = self._load(channel, chain, stored.values[channel])
            ancestor = stored.parent
        history: dict[str, DeltaChannelHistory] = {}
        for channel, steps in writes.items():
            history[channel] = {"writes": [write for step in reversed(steps) for write in step]}
            if channel in seeds:
                history[channel]["seed"] = seeds[channel]
        return history

    def _body(self, stored: StoredCheckpoint) -> Checkpoint:
        return cast("Checkpoint", self._load(None, self.stored.bodies, stored.body))

    def _load(self, channel: str | None, chain: Chain, number: int) -> Any:
        data = self._bytes(channel, chain, number)
        return self._serde.loads_typed((chain.blobs[number].type, data))

    def _load_write(self, write: Write) -> Any:
        blob, prefix = write.value, b""
        if blob.base is not None:
            prefix = self._bytes(write.channel, self.stored.chain(write.channel), blob.base)
        return self._serde.loads_typed((blob.type, unpack(blob, prefix)))

    def _bytes(self, channel: str | None, chain: Chain, number: int) -> bytes:
        return self._decoded.decode((self._incarnation, self._name, channel), chain, number)

    def _pack(self, channel: str | None, chain: Chain, value: Any) -> Blob:
        base = chain.base()
        prefix = b"" if base is None else self._bytes(channel, chain, base)
        return pack(*self._serde.dumps_typed(value), base, prefix)

    def _pack_write(self, channel: str, value: Any) -> Blob:
        """Pack a write relative to its channel's newest value, which it often resembles."""
        chain = self.stored.chain(channel)
        base = chain.next - 1 if chain.next - 1 in chain.blobs else None
        prefix = b"" if base is None else self._bytes(channel, chain, base)
        return pack(*self._serde.dumps_typed(value), base, prefix)
