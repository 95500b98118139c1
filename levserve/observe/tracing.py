"""OpenTelemetry spans of requests: one each, with a child for its time in the queue, in prefill and in decode.

A span is made when its request is over, from what its record knows, so that a request costs nothing while it runs. Needs the extra
`otel`, which is imported only if tracing is on. Where spans go, under which name and which of them is up to the SDK's own
OTEL_ environment variables.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from levserve import __version__
from levserve.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

PARENT_HEADERS = ("traceparent", "tracestate")
STOP_SECONDS = 2.0
INSTALL = "pip install 'levserve[otel]'"


class TracedRequest(Protocol):
    """What a span tells of a request that is over. Times are on `time.monotonic`'s clock."""

    request_id: str
    method: str
    route: str
    status: int
    started: float
    submitted: float | None
    model: str | None
    prompt_tokens: int
    error: str | None
    abort: str | None
    carrier: Mapping[str, str]

    @property
    def admitted(self) -> float | None: ...

    @property
    def first_token(self) -> float | None: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def finish_reasons(self) -> list[str]: ...


class Tracing:
    """Makes spans of records; called on HTTP threads. The provider sends them from a thread of its own, which `stop` ends."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("levserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def tell(self, record: TracedRequest, ended: float) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        offset = time.time_ns() - round(time.monotonic() * 1e9)
        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            context=self._propagator.extract(record.carrier),
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=round(record.started * 1e9) + offset,
        )
        inside = set_span_in_context(span)
        for name, start, end in _parts(record, ended):
            part = self._tracer.start_span(name, context=inside, start_time=round(start * 1e9) + offset)
            part.end(round(end * 1e9) + offset)
        if record.status >= 500 or (record.status < 400 and record.error):
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(round(ended * 1e9) + offset)

    def stop(self) -> None:
        """Sends what is left. A collector that does not answer would be tried again for longer than an exit may take."""
        thread = threading.Thread(target=self._provider.shutdown, name="levserve-tracing", daemon=True)
        thread.start()
        thread.join(STOP_SECONDS)


def start_tracing(destination: str) -> Tracing | None:
    """What --tracing asks for; None for off."""
    if destination == "off":
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _make_exporter(destination)
    except ImportError:
        raise ConfigError(f"--tracing {destination} needs OpenTelemetry: {INSTALL}") from None
    provider = TracerProvider(
        resource=Resource({"service.name": "levserve"}).merge(Resource.create()), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _make_exporter(destination: str) -> SpanExporter:
    if destination == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter: SpanExporter = OTLPSpanExporter()
    return exporter


def _parts(record: TracedRequest, ended: float) -> list[tuple[str, float, float]]:
    """The parts of its time that the request has come to, each with its start and its end."""
    starts = {"queue": record.submitted, "prefill": record.admitted, "decode": record.first_token}
    begun = [(name, start) for name, start in starts.items() if start is not None]
    ends = [start for _, start in begun[1:]] + [ended]
    return [(name, start, end) for (name, start), end in zip(begun, ends, strict=True)] if begun else []


def _attributes(record: TracedRequest) -> dict[str, str | int | list[str]]:
    """As OpenTelemetry's conventions for HTTP and for generative models name them."""
    told: dict[str, str | int | list[str] | None] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "levserve.request_id": record.request_id,
        "levserve.abort": record.abort,
        "error.type": record.error,
    }
    if record.submitted is not None:
        told |= {
            "gen_ai.response.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.response.finish_reasons": record.finish_reasons,
        }
    return {name: value for name, value in told.items() if value is not None}
