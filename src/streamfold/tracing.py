"""OpenTelemetry traces of this process, if the environment names an endpoint for them.

The standard variables configure everything: `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`,
`OTEL_TRACES_SAMPLER` and so on. Without an endpoint, no part of OpenTelemetry is imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

INSTALL: Final = "install the extra: pip install 'streamfold[otel]'"
_tracer: Tracer | None = None


def is_exported(signal: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment enables OTLP export of a signal, `traces` or `metrics`."""
    upper = signal.upper()
    endpoints = (f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return (
        any(environment.get(name) for name in endpoints)
        and environment.get("OTEL_SDK_DISABLED", "").lower() != "true"
        and environment.get(f"OTEL_{upper}_EXPORTER", "otlp") == "otlp"
    )


def warn_not_installed(error: ImportError) -> None:
    logger.warning(
        "OTEL_* variables ask for OpenTelemetry, but %s is missing: %s", error.name, INSTALL
    )


def span(name: str, **attributes: str | int) -> AbstractContextManager[object]:
    """Return a span for a block that runs rarely, or a null context if this process has no tracer."""
    if _tracer is None:
        return nullcontext()
    return _tracer.start_as_current_span(name, attributes=attributes)


@contextmanager
def tracing() -> Iterator[Tracer | None]:
    """Export spans during the block, and flush the last ones when it ends.

    Yields None if the environment does not enable traces, or OpenTelemetry is not installed.
    """
    global _tracer
    if not is_exported("traces"):
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        warn_not_installed(error)
        yield None
        return
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = provider.get_tracer("streamfold")
    try:
        yield _tracer
    finally:
        _tracer = None
        provider.shutdown()
