"""Traces requests, appends and commits. Imported only if the environment asks for traces.

A request is one span. An append is a child of it or, in a session that may last for days, a
separate span with a link to the session. Each append links to the commit that made it durable.
Appends of many streams share a commit, so each commit is a trace of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from time import perf_counter, time_ns
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from streamfold.server.http.access_log import shown_path
from streamfold.server.http.request import Request
from streamfold.server.metrics import AppendMetrics
from streamfold.store.append_queues import Submission
from streamfold.store.log.committer import CommitReport
from streamfold.store.log.shares import AppendAck

Handler = Callable[[Request], Awaitable[None]]

#: Commits remembered to find an acknowledged append's commit: far more than are ever in flight.
_RECENT_COMMITS = 64
_SESSION = b"s2s/"
_extract = TraceContextTextMapPropagator().extract


class _RequestSpan(NamedTuple):
    span: Span
    is_session: bool


_request_span: ContextVar[_RequestSpan | None] = ContextVar("request_span", default=None)


class _Commit(NamedTuple):
    #: As returned by `time.perf_counter`.
    started_at: float
    context: SpanContext


class ServerSpans:
    """Creates the spans of one server."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._commits: deque[_Commit] = deque(maxlen=_RECENT_COMMITS)

    def around(self, handler: Handler) -> Handler:
        """Return a request handler that wraps each request in a span."""

        async def handle(request: Request) -> None:
            is_session = request.headers.get(b"content-type", b"").startswith(_SESSION)
            attributes = {
                "http.request.method": request.method,
                "url.path": shown_path(request),
                "network.protocol.version": request.http_version,
                "client.address": request.client,
            }
            span = self._tracer.start_span(
                request.method, _parent(request), SpanKind.SERVER, attributes
            )
            token = _request_span.set(_RequestSpan(span, is_session))
            try:
                await handler(request)
            finally:
                _request_span.reset(token)
                span.set_attribute("http.response.status_code", request.status)
                if request.status >= 500 or not request.status:
                    span.set_status(StatusCode.ERROR)
                span.end()

        return handle

    def metrics(self) -> AppendMetrics:
        """Return append metrics that also create the spans of appends."""
        return _TracedAppendMetrics(self)

    def on_commit(self, report: CommitReport) -> None:
        """Record a commit that has just become durable."""
        ended_at = perf_counter()
        started_at = ended_at - report.duration
        attributes = {"streamfold.commit.bytes": report.size}
        begin = _wall(started_at)
        span = self._tracer.start_span("commit", Context(), attributes=attributes, start_time=begin)
        span.end(_wall(ended_at))
        self._commits.append(_Commit(started_at, span.get_span_context()))

    def on_append(self, submission: Submission, ack: AppendAck) -> None:
        """Record an append that is about to be acknowledged."""
        accepted_at, request = submission.accepted_at, _request_span.get()
        if accepted_at is None or request is None:
            return
        links = [Link(commit.context) for commit in self._commits_of(accepted_at)]
        parent = set_span_in_context(request.span)
        if request.is_session:
            parent = Context()
            links.append(Link(request.span.get_span_context()))
        attributes = {
            "streamfold.append.records": ack.end.seq_num - ack.start.seq_num,
            "streamfold.append.seq_num": ack.start.seq_num,
            "streamfold.append.metered_bytes": submission.metered,
        }
        begin = _wall(submission.submitted_at)
        span = self._tracer.start_span(
            "append", parent, attributes=attributes, links=links, start_time=begin
        )
        span.add_event("accepted", timestamp=_wall(accepted_at))
        span.end()

    def _commits_of(self, accepted_at: float) -> list[_Commit]:
        """Return the first commit that began after `accepted_at`, which contains that append."""
        return [commit for commit in self._commits if commit.started_at >= accepted_at][:1]


class _TracedAppendMetrics(AppendMetrics):
    def __init__(self, spans: ServerSpans) -> None:
        super().__init__()
        self._spans = spans

    def observe(self, submission: Submission, ack: AppendAck) -> None:
        super().observe(submission, ack)
        self._spans.on_append(submission, ack)


def _parent(request: Request) -> Context:
    """Return the caller's span context, if it sent one."""
    headers = {
        name: value.decode("latin-1")
        for name in ("traceparent", "tracestate")
        if (value := request.headers.get(name.encode())) is not None
    }
    return _extract(headers, Context()) if headers else Context()


def _wall(at: float) -> int:
    """Return a `time.perf_counter` reading as nanoseconds since 1970."""
    return time_ns() - int((perf_counter() - at) * 1e9)
