"""Starts a server from its configuration, serves, drains and stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from prometheus_client import PROCESS_COLLECTOR
from prometheus_client.registry import Collector

from streamfold._native import tune_memory
from streamfold.cluster import LeaseKeeper
from streamfold.errors import StreamfoldError
from streamfold.model.names import parse_bucket_name
from streamfold.model.resource_spec import ResourceSpec, read_resource_spec
from streamfold.server.application import Application
from streamfold.server.auth import Access
from streamfold.server.config import Configuration
from streamfold.server.console import HistoryHandler, MetricsHistory, ThisServer, add_console
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
from streamfold.server.http.door import OpenDoor, TlsFiles, bind
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.offload import SWITCH_INTERVAL
from streamfold.server.http.request_limits import RequestBudget
from streamfold.server.http.response_limits import ResponseBudget
from streamfold.server.http.router import Route, Router
from streamfold.server.metrics import (
    AppendMetrics,
    FollowerMetrics,
    StoreMetrics,
)
from streamfold.server.ops import OpsEndpoints, add_front_page
from streamfold.server.s2.responses import write_problem
from streamfold.server.s2.routes import add_s2
from streamfold.server.standby import (
    StandbyAnswers,
    StandbyStoppedError,
    active_server,
    new_lease,
)
from streamfold.store.engine.disk_space import memory_total
from streamfold.store.engine.location import Location, open_location
from streamfold.store.store import StreamStore, open_store
from streamfold.tracing import is_exported, tracing, warn_not_installed

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from streamfold.server.telemetry import ServerSpans

logger = logging.getLogger(__name__)

#: Seconds for connections to close after their last response.
_CLOSE_TIMEOUT: Final = 2.0
#: Net new objects between collections of the youngest generation, and collections before older
#: generations follow. A collection holds the GIL for 0.1 us per object, and requests may have hundreds
#: of thousands, of which at most 30,000 are examined together. 500 concurrent appends have fewer than
#: 15,000, most of which are freed without a collection.
_GC_THRESHOLDS: Final = (15_000, 0, 1_000)
#: Settings of glibc's allocator: bytes from which a block is mapped separately, free bytes to keep,
#: and heaps shared by threads. By default, glibc unmaps each batch's memory and maps it again for
#: the next: 300 page faults per MiB of records, which take longer than copying them. Each heap
#: keeps its own free memory, so there are few heaps.
_MAPPED_BYTES, _KEPT_BYTES, _HEAPS = 32 << 20, 128 << 20, 2


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    store: StreamStore
    url: str
    port: int
    gate: DrainGate
    #: Whether requests need an access token.
    guarded: bool
    client_limits: ClientLimits
    routes: Sequence[Route]
    #: The store's lease on object storage.
    lease: LeaseKeeper | None

    def exports(self) -> str:
        """Return shell commands that point S2 clients at the server."""
        return (
            f"export S2_ACCOUNT_ENDPOINT={self.url}\n"
            f"export S2_BASIN_ENDPOINT={self.url}\n"
            f"export S2_ACCESS_TOKEN={'<token>' if self.guarded else 'ignored'}\n"
        )


@asynccontextmanager
async def running_server(
    configuration: Configuration, stopping: asyncio.Event | None = None
) -> AsyncIterator[Server]:
    """Run a server while the context lasts.

    On object storage, it first stands by until it has the store's lease, and raises StandbyStoppedError
    if `stopping` is set before. Leaving the context drains the server: new requests are rejected,
    sessions are asked to reconnect, and every accepted append is acknowledged before the store closes.
    """
    init_file = configuration.init_file
    spec = read_resource_spec(init_file, "init file") if init_file else ResourceSpec()
    if configuration.tls is not None:
        configuration.tls.check()
    async with AsyncExitStack() as stack:
        # Exited last, because sending the last spans may take long and the store is closed by then.
        tracer = stack.enter_context(tracing())
        # Bind before the store opens, so that an address in use fails at once.
        door = bind(configuration.listening_host, configuration.port)
        stack.callback(door.close)
        tls = configuration.tls
        if configuration.tls_self:
            # Imported here because few servers need the libraries that create certificates.
            from streamfold.server.config import write_self_signed

            tls = write_self_signed(Path(stack.enter_context(TemporaryDirectory())))
        client_limits = _client_limits(configuration)
        answers = StandbyAnswers(metrics=configuration.open_metrics or not configuration.guarded)
        listener = OpenDoor(door, answers, tls, client_limits)
        location = await asyncio.to_thread(open_location, configuration.location)
        stack.push_async_callback(asyncio.to_thread, location.close)
        lease = await _new_lease(configuration, location)
        if lease is not None:
            stack.push_async_callback(listener.stop, _CLOSE_TIMEOUT)
            await stack.enter_async_context(
                active_server(
                    lease,
                    answers,
                    url=location.url,
                    take_over=configuration.take_over,
                    stopping=stopping or asyncio.Event(),
                    on_standby=listener.start,
                )
            )
        store = await stack.enter_async_context(
            open_store(
                location,
                configuration.store,
                take_over=configuration.take_over,
                accept_loss=configuration.accept_loss,
                lease=lease,
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
        spans = _server_spans(tracer, store)
        instruments = make_instruments(configuration, store, drain_gate, client_limits, spans)
        if is_exported("metrics"):
            await _export_metrics(stack, instruments)
        history = MetricsHistory((*instruments.collectors, PROCESS_COLLECTOR))
        if configuration.console is not None:
            await stack.enter_async_context(history.running())
        application = make_application(
            configuration,
            store,
            drain_gate,
            access,
            subscriptions,
            access_log,
            client_limits,
            instruments,
            history,
            lease,
        )
        listener.switch(application if spans is None else spans.around(application))
        listener.start()
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
                lease,
            )
        finally:
            await drain_gate.drain(configuration.drain_timeout)
            await drain_gate.linger(configuration.linger)
            await listener.stop(_CLOSE_TIMEOUT)


def _client_limits(configuration: Configuration) -> ClientLimits:
    descriptors = raise_descriptor_limit()
    files = configuration.upload_files or upload_files_max(descriptors)
    return ClientLimits(
        RequestBudget(configuration.body_timeout, configuration.body_bytes, files),
        Connections(
            connections_max(descriptors, memory_total()),
            configuration.first_request,
            configuration.idle_connection,
        ),
        ResponseBudget(configuration.unread_bytes, configuration.write_deadline),
    )


async def _new_lease(configuration: Configuration, location: Location) -> LeaseKeeper | None:
    """Return the store's lease, if it has leases. Writes nothing to an unusable bucket."""
    if not configuration.lease_expiry:
        return None
    lease = new_lease(location, configuration.name, configuration.lease_expiry)
    if lease is not None:
        await location.check_access()
    return lease


async def _ensure(store: StreamStore, spec: ResourceSpec) -> None:
    """Ensure everything in `spec`, in order."""
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


def _server_spans(tracer: Tracer | None, store: StreamStore) -> ServerSpans | None:
    if tracer is None:
        return None
    from streamfold.server.telemetry import ServerSpans

    spans = ServerSpans(tracer)
    store.on_commit(spans.on_commit)
    return spans


async def _export_metrics(stack: AsyncExitStack, instruments: Instruments) -> None:
    """Export metrics by OTLP until the stack is left."""
    try:
        from streamfold.server.otlp_metrics import MetricsExport
    except ImportError as error:
        warn_not_installed(error)
        return
    await stack.enter_async_context(MetricsExport(instruments.collectors).running())


@dataclass(frozen=True, slots=True)
class Instruments:
    """A server's metrics."""

    appends: AppendMetrics
    #: All collectors, including `appends`.
    collectors: Sequence[Collector]


def make_instruments(
    configuration: Configuration,
    store: StreamStore,
    drain_gate: DrainGate,
    client_limits: ClientLimits,
    spans: ServerSpans | None = None,
) -> Instruments:
    appends = AppendMetrics() if spans is None else spans.metrics()
    collectors = (
        appends,
        StoreMetrics(store, None if configuration.open_metrics else store.url),
        ClientMetrics(client_limits),
        FollowerMetrics(drain_gate),
    )
    return Instruments(appends, collectors)


def make_application(
    configuration: Configuration,
    store: StreamStore,
    drain_gate: DrainGate,
    access: Access,
    subscriptions: Subscriptions,
    access_log: AccessLog | None,
    client_limits: ClientLimits,
    instruments: Instruments,
    history: MetricsHistory,
    lease: LeaseKeeper | None = None,
) -> Application:
    router = Router()
    add_s2(
        router,
        store,
        drain_gate,
        instruments.appends,
        configuration.heartbeat,
        access,
    )
    OpsEndpoints(
        store,
        drain_gate,
        instruments.collectors,
        access,
        lease,
        open_metrics=configuration.open_metrics,
    ).add_to(router)
    add_front_page(router, console=configuration.console is not None)
    if configuration.console is not None:
        figures = HistoryHandler(history, access, open_metrics=configuration.open_metrics)
        this = ThisServer(configuration.name, store.url, lease)
        add_console(router, configuration.console, access, drain_gate, figures, this)
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
        lease,
    )


async def serve(configuration: Configuration, announce: Callable[[Server], None]) -> None:
    """Run a server until the process is asked to stop, then drain it.

    A permanent failure of the store also stops the server, and is raised.
    """
    stop = asyncio.Event()
    _watch_signals(stop)
    failure = None
    try:
        async with running_server(configuration, stop) as server:
            announce(server)
            failure = await _failure_before(stop, server)
            if failure is not None:
                logger.error("the server stops: %s", failure)
    except StandbyStoppedError as stopped:
        logger.info("%s", stopped)
    if failure is not None:
        raise failure


def _watch_signals(stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM and SIGINT, and when the terminal closes."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
        loop.add_signal_handler(signal.SIGHUP, stop.set)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Without a handler, these signals would kill the process.
        loop.add_signal_handler(number, _ignore_signal, number)


def _ignore_signal(number: signal.Signals) -> None:
    logger.warning(
        "%s is ignored: there is nothing to reload; SIGTERM stops the server", number.name
    )


async def _failure_before(stop: asyncio.Event, server: Server) -> StreamfoldError | None:
    """Return the error that ended the store or its lease, or None if `stop` came first."""
    stopping = asyncio.create_task(stop.wait())
    failing = [asyncio.create_task(server.store.stopped())]
    if server.lease is not None:
        failing.append(asyncio.create_task(server.lease.lost()))
    try:
        await asyncio.wait({stopping, *failing}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return None
        return next(task.result() for task in failing if task.done())
    finally:
        for task in (stopping, *failing):
            task.cancel()


def run(configuration: Configuration, announce: Callable[[Server], None]) -> None:
    """Serve in a new event loop. uvloop, if installed, doubles the throughput."""
    tune_collector()
    tune_allocator()
    sys.setswitchinterval(SWITCH_INTERVAL)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(configuration, announce))


def tune_collector() -> None:
    """Collect garbage less often: modules stay loaded, and reference counting frees the rest."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def tune_allocator() -> None:
    """Keep freed memory for the next batch. Does nothing without glibc."""
    tune_memory(_MAPPED_BYTES, _KEPT_BYTES, _HEAPS)


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
