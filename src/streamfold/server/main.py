"""A server from its configuration: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from streamfold.errors import StreamfoldError
from streamfold.model.names import parse_bucket_name
from streamfold.model.resource_spec import ResourceSpec, read_resource_spec
from streamfold.records import release_compiler, warm_up
from streamfold.server.application import Application
from streamfold.server.auth import Access
from streamfold.server.config import Configuration
from streamfold.server.console import add_console
from streamfold.server.durable_streams.routes import DurableStreamsFace
from streamfold.server.durable_streams.subscriptions import Subscriptions
from streamfold.server.http.access_log import AccessLog
from streamfold.server.http.connections import (
    ClientLimits,
    ClientMetrics,
    Connections,
    connections_max,
    raise_descriptor_limit,
    upload_files_max,
)
from streamfold.server.http.cors import PagePolicy
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.listener import Listener, TlsFiles, bind
from streamfold.server.http.offload import SWITCH_INTERVAL
from streamfold.server.http.request_limits import RequestBudget
from streamfold.server.http.response_limits import ResponseBudget
from streamfold.server.http.router import Route, Router
from streamfold.server.metrics import (
    AppendMetrics,
    FollowerMetrics,
    KernelMetrics,
    StoreMetrics,
)
from streamfold.server.ops import OpsEndpoints, add_front_page
from streamfold.server.s2.responses import write_problem
from streamfold.server.s2.routes import add_s2
from streamfold.store.engine.disk_space import memory_total
from streamfold.store.engine.slatedb_binding import warm_up_writes
from streamfold.store.store import StreamStore, open_store

logger = logging.getLogger(__name__)

#: Seconds that connections get to close after their last answer.
_CLOSE_TIMEOUT: Final = 2.0
#: Objects made and not freed between two looks of the collector at the youngest ones; looks until it
#: also looks at older ones, and at all. Each look keeps the interpreter's lock, 0.1 us for an object:
#: requests have hundreds of thousands at times, of which no more than 30,000 are looked at together.
#: 500 appends at once have fewer than 15,000, and most of their objects are freed without any look.
_GC_THRESHOLDS: Final = (15_000, 0, 1_000)
#: Parameters of glibc's `mallopt`, by their numbers in <malloc.h>: bytes from which a block has its own
#: mapping; free bytes that are kept; heaps that threads share. Without them, glibc returns the memory
#: of a batch to the system and has it mapped anew for the next: 300 page faults per MiB of records,
#: which take longer than copying them. Few heaps, because each keeps free memory of its own.
_MALLOC_PARAMETERS: Final = {-3: 32 << 20, -1: 128 << 20, -8: 2}


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is up."""

    store: StreamStore
    url: str
    port: int
    gate: DrainGate
    #: Whether requests need an access token.
    guarded: bool
    client_limits: ClientLimits
    routes: Sequence[Route]

    def exports(self) -> str:
        """The lines that let S2's clients find the server, for a shell."""
        return (
            f"export S2_ACCOUNT_ENDPOINT={self.url}\n"
            f"export S2_BASIN_ENDPOINT={self.url}\n"
            f"export S2_ACCESS_TOKEN={'<token>' if self.guarded else 'ignored'}\n"
        )


@asynccontextmanager
async def running_server(configuration: Configuration) -> AsyncIterator[Server]:
    """A server that takes requests while the context lasts.

    Leaving it drains: new requests are turned away, sessions are asked to reconnect, and every accepted
    append is acknowledged before the store closes.
    """
    init_file = configuration.init_file
    spec = read_resource_spec(init_file, "init file") if init_file else ResourceSpec()
    if configuration.tls is not None:
        configuration.tls.check()
    async with AsyncExitStack() as stack:
        # Before the store opens, so that an address in use fails at once.
        bound = stack.enter_context(bind(configuration.listening_host, configuration.port))
        tls = configuration.tls
        if configuration.tls_self:
            # Imported here: making certificates takes libraries that few servers need.
            from streamfold.server.config import write_self_signed

            tls = write_self_signed(Path(stack.enter_context(TemporaryDirectory())))
        store = await stack.enter_async_context(
            open_store(
                configuration.location,
                configuration.store,
                take_over=configuration.take_over,
                accept_loss=configuration.accept_loss,
            )
        )
        await _ensure(store, spec)
        access_log = AccessLog(sys.stderr.buffer) if configuration.access_log else None
        if access_log is not None:
            await stack.enter_async_context(access_log.running())
        drain_gate = DrainGate()
        access = Access(store.account, configuration.root_token)
        subscriptions = _subscriptions(configuration, store, access)
        await stack.enter_async_context(subscriptions.running())
        client_limits, kernels = _client_limits(configuration), KernelMetrics()
        application = make_application(
            configuration,
            store,
            drain_gate,
            access,
            subscriptions,
            access_log,
            client_limits,
            kernels,
        )
        listener = Listener(bound, application, tls, client_limits)
        listener.start()
        # From here on requests are answered, by plain Python until the kernels are loaded.
        await stack.enter_async_context(_loading_kernels(kernels))
        try:
            url = configuration.url(listener.port)
            yield Server(
                store,
                url,
                listener.port,
                drain_gate,
                configuration.guarded,
                client_limits,
                application.routes,
            )
        finally:
            await drain_gate.drain(configuration.drain_timeout)
            await drain_gate.linger(configuration.linger)
            await listener.stop(_CLOSE_TIMEOUT)


@asynccontextmanager
async def _loading_kernels(kernels: KernelMetrics) -> AsyncIterator[None]:
    """Load the compiled kernels in a thread: 1 s, and 3 s when they must be compiled."""

    async def load() -> None:
        kernels.loaded = await asyncio.to_thread(_load_kernels)

    loading = asyncio.create_task(load())
    try:
        yield
    finally:
        # A thread cannot be interrupted, and must not run while the interpreter ends.
        await loading


def _load_kernels() -> bool:
    loaded = warm_up()
    if loaded:
        warm_up_writes()
        release_compiler()
    return loaded


def _client_limits(configuration: Configuration) -> ClientLimits:
    descriptors = raise_descriptor_limit()
    files = configuration.upload_files or upload_files_max(descriptors)
    return ClientLimits(
        RequestBudget(configuration.body_timeout, configuration.body_bytes, files),
        Connections(
            connections_max(descriptors, memory_total(), tls=configuration.encrypted),
            configuration.first_request,
            configuration.idle_connection,
        ),
        ResponseBudget(configuration.unread_bytes, configuration.write_deadline),
    )


async def _ensure(store: StreamStore, spec: ResourceSpec) -> None:
    """Ensure everything in `spec`, in its order."""
    for basin in spec.basins:
        await store.ensure_basin(basin.name, basin.to_model())
        for stream in basin.streams:
            await store.ensure_stream(basin.name, stream.name, stream.to_model())


def _subscriptions(
    configuration: Configuration, store: StreamStore, access: Access
) -> Subscriptions:
    return Subscriptions(
        store,
        parse_bucket_name(configuration.default_basin),
        public_url=lambda request: request.url_of(""),
        authorise=access.grant,
        grant_of=access.grant_of,
        own_url=configuration.public_url,
        local_webhooks=configuration.local_webhooks,
    )


def make_application(
    configuration: Configuration,
    store: StreamStore,
    drain_gate: DrainGate,
    access: Access,
    subscriptions: Subscriptions,
    access_log: AccessLog | None,
    client_limits: ClientLimits,
    kernels: KernelMetrics,
) -> Application:
    router, instruments = Router(), AppendMetrics()
    add_s2(
        router,
        store,
        drain_gate,
        instruments,
        configuration.heartbeat,
        access,
    )
    measured = (
        instruments,
        StoreMetrics(store, None if configuration.open_metrics else store.url),
        ClientMetrics(client_limits),
        FollowerMetrics(drain_gate),
        kernels,
    )
    OpsEndpoints(
        store, drain_gate, measured, access, open_metrics=configuration.open_metrics
    ).add_to(router)
    add_front_page(router, console=configuration.console is not None)
    if configuration.console is not None:
        add_console(router, configuration.console, access, drain_gate)
    durable = DurableStreamsFace(
        store,
        drain_gate,
        access,
        subscriptions,
        parse_bucket_name(configuration.default_basin),
        configuration.long_poll,
        private=configuration.guarded,
    )
    pages = PagePolicy(
        guarded=configuration.guarded,
        enabled=configuration.cors,
        origins=configuration.cors_origins,
        known_hosts=configuration.known_hosts,
    )
    return Application(
        router,
        durable,
        write_problem,
        drain_gate,
        access_log,
        pages,
        configuration.public_url,
        configuration.requests,
    )


async def serve(configuration: Configuration, announce: Callable[[Server], None]) -> None:
    """Run a server until the process is asked to stop, then drain it.

    A store that has failed for good stops the server too, and its error is raised.
    """
    stop = asyncio.Event()
    _watch_signals(stop)
    async with running_server(configuration) as server:
        announce(server)
        failure = await _failure_before(stop, server.store)
        if failure is not None:
            logger.error("the server stops: %s", failure)
    if failure is not None:
        raise failure


def _watch_signals(stop: asyncio.Event) -> None:
    """Set `stop` when the process is asked to end, by a terminal that closes, too."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
        loop.add_signal_handler(signal.SIGHUP, stop.set)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Without a handler they would end the process at once.
        loop.add_signal_handler(number, _ignore_signal, number)


def _ignore_signal(number: signal.Signals) -> None:
    logger.warning(
        "%s is ignored: there is nothing to reload; SIGTERM stops the server", number.name
    )


async def _failure_before(stop: asyncio.Event, store: StreamStore) -> StreamfoldError | None:
    """The error that ended the store; None if the process was asked to stop first."""
    stopping, failing = asyncio.create_task(stop.wait()), asyncio.create_task(store.stopped())
    try:
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        return None if stopping.done() else failing.result()
    finally:
        stopping.cancel()
        failing.cancel()


def run(configuration: Configuration, announce: Callable[[Server], None]) -> None:
    """Serve in a new event loop: uvloop if installed, which doubles the throughput."""
    tune_collector()
    tune_allocator()
    sys.setswitchinterval(SWITCH_INTERVAL)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(configuration, announce))


def tune_collector() -> None:
    """Collect garbage less often: loaded modules stay, and reference counting frees the rest."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def tune_allocator() -> None:
    """Keep freed memory for the next batch; does nothing where the C library has no such settings."""
    set_parameter = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_parameter is not None:
        for parameter, value in _MALLOC_PARAMETERS.items():
            set_parameter(parameter, value)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


__all__ = [
    "Server",
    "TlsFiles",
    "loop_factory",
    "run",
    "running_server",
    "serve",
    "tune_allocator",
    "tune_collector",
]
