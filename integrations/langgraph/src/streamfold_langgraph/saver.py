"""The saver: LangGraph's checkpointer interface over threads in streams."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from s2_sdk import S2Basin, S2Error

from streamfold import connect
from streamfold.errors import InvalidError
from streamfold.follow import Backoff
from streamfold.follow.clients.s2 import translate
from streamfold.model.names import parse_stream_name
from streamfold_langgraph.checkpoints import Checkpoints
from streamfold_langgraph.errors import ThreadConflictError
from streamfold_langgraph.open_thread import OpenThread
from streamfold_langgraph.thread import Copied, Drop, Event, Thread
from streamfold_langgraph.values import DecodedValues

P = ParamSpec("P")
T = TypeVar("T")

#: Cache size for the decoded values of all threads, in bytes.
_DECODED_BYTES = 64 << 20


def _on_its_loop(
    method: Callable[Concatenate[StreamfoldSaver, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[StreamfoldSaver, P], Coroutine[Any, Any, T]]:
    """Run the method on the saver's event loop, whichever loop awaits it."""

    @wraps(method)
    async def run(self: StreamfoldSaver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if asyncio.get_running_loop() is self.loop:
            return await method(self, *args, **kwargs)
        done = asyncio.run_coroutine_threadsafe(method(self, *args, **kwargs), self.loop)
        return await asyncio.wrap_future(done)

    return run


class StreamfoldSaver(BaseCheckpointSaver[int]):
    """Stores each thread's checkpoints as deltas in its own stream.

        async with StreamfoldSaver.connect("http://localhost:8080", basin="my-agents") as saver:
            graph = builder.compile(checkpointer=saver)

    A thread's stream is named `prefix` plus its thread_id, and has all of its namespaces. The saver
    belongs to the event loop in which it is created. Methods without the prefix `a` may be called
    from other threads. `open_threads` bounds the number of threads in memory.
    """

    def __init__(
        self,
        basin: S2Basin,
        *,
        prefix: str = "langgraph/",
        serde: SerializerProtocol | None = None,
        open_threads: int = 128,
        backoff: Backoff | None = None,
    ) -> None:
        super().__init__(serde=serde)
        self.loop = asyncio.get_running_loop()
        self._basin, self._prefix = basin, prefix
        self._open_threads = open_threads
        self._backoff = backoff or Backoff(longest=1.0, attempts=3)
        self._threads: OrderedDict[str, OpenThread] = OrderedDict()
        self._decoded = DecodedValues(_DECODED_BYTES)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, endpoint: str | None = None, *, basin: str, token: str | None = None, **options: Any
    ) -> AsyncIterator[Self]:
        """Open a saver on the running event loop.

        Without `endpoint` and `token`, uses S2_ACCOUNT_ENDPOINT, S2_BASIN_ENDPOINT and
        S2_ACCESS_TOKEN. `options` go to the constructor.
        """
        async with connect(endpoint, token=token) as s2:
            saver = cls(s2.basin(basin), **options)
            try:
                yield saver
            finally:
                await saver.aclose()

    @classmethod
    @contextmanager
    def connect_sync(
        cls, endpoint: str | None = None, *, basin: str, token: str | None = None, **options: Any
    ) -> Iterator[Self]:
        """Open a saver for a program without an event loop. It runs its own loop in a thread."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="streamfold-langgraph", daemon=True)
        thread.start()
        saver = cls.connect(endpoint, basin=basin, token=token, **options)
        try:
            yield asyncio.run_coroutine_threadsafe(saver.__aenter__(), loop).result()
            asyncio.run_coroutine_threadsafe(saver.__aexit__(None, None, None), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def aclose(self) -> None:
        """Drop all threads from memory. Stored data stays."""
        while self._threads:
            _, thread = self._threads.popitem()
            await thread.close()

    # asynchronous methods

    @_on_its_loop
    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that `config` names, or the newest of its thread and namespace."""
        thread_id, name = _place(config)
        async with self._using(thread_id) as open_thread:
            namespace = self._checkpoints(thread_id, name, await open_thread.catch_up())
            if (checkpoint_id := get_checkpoint_id(config)) is not None:
                open_thread.forkable.add((name, checkpoint_id))
                return namespace.read(checkpoint_id)
            if (newest := namespace.stored.newest) is None:
                open_thread.read_empty.add(name)
                return None
            return namespace.read(newest)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Yield the matching checkpoints, newest first, of all threads if `config` is None."""
        for place in (await self._matching(config, filter, before))[:limit]:
            found = await self._read(*place)
            if found is not None:  # it may have been removed meanwhile
                yield found

    @_on_its_loop
    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint durably.

        Raises ThreadConflictError and stores nothing if its parent is no longer the newest
        checkpoint, because another writer has continued the thread. A parent that was read by id
        may be any checkpoint: that forks the thread.
        """
        thread_id, name = _place(config)
        parent = get_checkpoint_id(config)
        described = get_checkpoint_metadata(config, metadata)
        async with self._using(thread_id) as open_thread:
            forks = metadata.get("source") == "fork" or (name, parent) in open_thread.forkable
            is_root = parent is None and name not in open_thread.read_empty
            order: int | None = None

            def make(thread: Thread) -> Event:
                nonlocal forks, order
                namespace = self._checkpoints(thread_id, name, thread)
                newest = namespace.stored.newest
                if order is None:
                    order = thread.count
                    forks = forks or (is_root and newest is not None)
                if newest is not None and newest != parent and not forks:
                    raise ThreadConflictError(thread_id, parent, newest)
                return namespace.put(parent, checkpoint, described, new_versions)

            def is_stored(thread: Thread) -> bool:
                stored = thread.namespace(name).checkpoints.get(checkpoint["id"])
                return stored is not None and order is not None and stored.order >= order

            await open_thread.append(make, is_stored)
            open_thread.read_empty.discard(name)
            await open_thread.snapshot_if_due()
        return _config(thread_id, name, checkpoint["id"])

    @_on_its_loop
    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store a task's writes durably. The first writer of a task wins."""
        thread_id, name = _place(config)
        checkpoint_id = str(get_checkpoint_id(config))
        async with self._using(thread_id) as open_thread:

            def make(thread: Thread) -> Event | None:
                namespace = self._checkpoints(thread_id, name, thread)
                return namespace.put_writes(checkpoint_id, writes, task_id, task_path)

            # Writes that replace earlier ones are idempotent.
            await open_thread.append(make, lambda _: False)

    @_on_its_loop
    async def adelete_thread(self, thread_id: str) -> None:
        """Delete the thread's stream."""
        async with self._using(str(thread_id)) as open_thread:
            await open_thread.delete()

    @_on_its_loop
    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove these runs' checkpoints from all threads.

        Reads every thread, because there is no index.
        """
        runs = set(run_ids)
        for thread_id in await self._thread_ids() if runs else ():
            await self._drop(
                thread_id,
                lambda namespace: [
                    checkpoint_id
                    for checkpoint_id, stored in namespace.stored.checkpoints.items()
                    if namespace.metadata(stored).get("run_id") in runs
                ],
            )

    @_on_its_loop
    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a whole thread to an empty one."""
        async with self._using(str(source_thread_id)) as source:
            thread = await source.catch_up()
            encoded = msgspec.msgpack.encode(Copied(thread.namespaces, thread.count))
            event = msgspec.msgpack.decode(encoded, type=Copied)
        if not thread.count:
            return
        async with self._using(str(target_thread_id)) as target:

            def make(thread: Thread) -> Event:
                if thread.incarnation:
                    raise InvalidError(
                        f"thread {target_thread_id!r} is not empty: copy to a new thread_id"
                    )
                return event

            await target.append(make, lambda thread: thread.count == event.count)

    @_on_its_loop
    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep only the newest checkpoint of each namespace, or with "delete" none.

        Frees the space at once. Also keeps the ancestors from which LangGraph rebuilds the newest
        checkpoint's delta channels.
        """
        if strategy not in ("keep_latest", "delete"):
            raise InvalidError(f"strategy {strategy!r} is unknown: use keep_latest or delete")
        for thread_id in thread_ids:
            if strategy == "delete":
                await self.adelete_thread(thread_id)
            else:
                await self._drop(str(thread_id), Checkpoints.prunable)

    @_on_its_loop
    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the history from which LangGraph rebuilds its delta channels, in one read."""
        thread_id, name = _place(config)
        async with self._using(thread_id) as open_thread:
            namespace = self._checkpoints(thread_id, name, await open_thread.catch_up())
            return namespace.delta_history(get_checkpoint_id(config), channels)

    # synchronous methods, for other threads

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return self._wait(self.aget_tuple, config)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        for place in self._wait(self._matching, config, filter, before)[:limit]:
            if (found := self._wait(self._read, *place)) is not None:
                yield found

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return self._wait(self.aput, config, checkpoint, metadata, new_versions)

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        self._wait(self.aput_writes, config, writes, task_id, task_path)

    def delete_thread(self, thread_id: str) -> None:
        self._wait(self.adelete_thread, thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        self._wait(self.adelete_for_runs, run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self._wait(self.acopy_thread, source_thread_id, target_thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        self._wait(self.aprune, thread_ids, strategy=strategy)

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return self._wait(self.aget_delta_channel_history, config=config, channels=channels)

    # threads

    def _wait(
        self, method: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an asynchronous method from a thread other than the saver's."""
        try:
            is_here = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            is_here = False
        if is_here:
            raise asyncio.InvalidStateError(
                "a call without `await` would block the saver's event loop: use the method whose name "
                "begins with `a`, such as `await graph.ainvoke(…)`, or call from another thread"
            )
        return asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self.loop).result()

    @asynccontextmanager
    async def _using(self, thread_id: str) -> AsyncIterator[OpenThread]:
        """Hold a thread exclusively."""
        open_thread = self._threads.get(thread_id)
        if open_thread is None:
            stream = parse_stream_name(self._prefix + thread_id)
            open_thread = OpenThread(self._basin, stream, thread_id, self._backoff)
            self._threads[thread_id] = open_thread
        self._threads.move_to_end(thread_id)
        open_thread.users += 1
        try:
            async with open_thread.lock:
                yield open_thread
        finally:
            open_thread.users -= 1
            await self._close_oldest()

    async def _close_oldest(self) -> None:
        excess = len(self._threads) - self._open_threads
        idle = [name for name, thread in self._threads.items() if not thread.users]
        for thread_id in idle[: max(excess, 0)]:
            await self._threads.pop(thread_id).close()

    def _checkpoints(self, thread_id: str, name: str, thread: Thread) -> Checkpoints:
        return Checkpoints(thread_id, name, thread, self.serde, self._decoded)

    async def _thread_ids(self) -> Sequence[str]:
        try:
            return [
                info.name.removeprefix(self._prefix)
                async for info in self._basin.list_all_streams(prefix=self._prefix)
            ]
        except S2Error as error:
            raise translate(error) from error

    @_on_its_loop
    async def _matching(
        self,
        config: RunnableConfig | None,
        wanted: dict[str, Any] | None,
        before: RunnableConfig | None,
    ) -> Sequence[tuple[str, str, str]]:
        """Return the thread, namespace and id of each matching checkpoint, newest first."""
        configurable = config["configurable"] if config else {}
        only_name, only_id = configurable.get("checkpoint_ns"), configurable.get("checkpoint_id")
        limit = get_checkpoint_id(before) if before else None
        found: list[tuple[tuple[str, int], tuple[str, str, str]]] = []
        for thread_id in [str(configurable["thread_id"])] if config else await self._thread_ids():
            async with self._using(thread_id) as open_thread:
                thread = await open_thread.catch_up()
            for name in thread.namespaces:
                if only_name not in (None, name):
                    continue
                namespace = self._checkpoints(thread_id, name, thread)
                checkpoints = namespace.stored.checkpoints
                end = checkpoints.get(limit) if limit else None
                for checkpoint_id, stored in checkpoints.items():
                    is_before = (
                        limit is None
                        or (end is not None and stored.order < end.order)
                        or (end is None and checkpoint_id < limit)
                    )
                    if is_before and only_id in (None, checkpoint_id):
                        metadata = namespace.metadata(stored) if wanted else {}
                        if all(metadata.get(key) == value for key, value in (wanted or {}).items()):
                            # Within one thread, the stream decides the order; between threads, the
                            # ids do.
                            rank = ("" if config else checkpoint_id, stored.order)
                            found.append((rank, (thread_id, name, checkpoint_id)))
        found.sort(reverse=True)
        return [place for _, place in found]

    @_on_its_loop
    async def _read(self, thread_id: str, name: str, checkpoint_id: str) -> CheckpointTuple | None:
        async with self._using(thread_id) as open_thread:
            thread = open_thread.thread if open_thread.is_loaded else await open_thread.catch_up()
            return self._checkpoints(thread_id, name, thread).read(checkpoint_id)

    async def _drop(self, thread_id: str, choose: Callable[[Checkpoints], Sequence[str]]) -> None:
        """Remove checkpoints and everything that only they need."""
        async with self._using(thread_id) as open_thread:

            def make(thread: Thread) -> Event | None:
                chosen = {
                    name: list(choose(self._checkpoints(thread_id, name, thread)))
                    for name in thread.namespaces
                }
                chosen = {name: ids for name, ids in chosen.items() if ids}
                return Drop(chosen) if chosen else None

            if make(await open_thread.catch_up()) is not None:
                await open_thread.append(make, lambda thread: make(thread) is None)
                await open_thread.snapshot()


def _place(config: RunnableConfig) -> tuple[str, str]:
    """Return the thread and namespace that a config names."""
    configurable = config["configurable"]
    return str(configurable["thread_id"]), configurable.get("checkpoint_ns", "")


def _config(thread_id: str, name: str, checkpoint_id: str) -> RunnableConfig:
    return {
        "configurable": {
            "thread_id": thread_id,
            "checkpoint_ns": name,
            "checkpoint_id": checkpoint_id,
        }
    }
