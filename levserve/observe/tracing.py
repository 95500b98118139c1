"""OpenTelemetry spans: one per request, with children for its time in the queue, in prefill and in decode.

Spans are made from the request log once a request is over, so tracing costs a running request nothing. Needs
the `otel` extra; its packages may be missing, so they are imported only if tracing is on. The SDK's OTEL_
environment variables set the destination, the service name and the sampling.
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
    """What a span needs to know about a finished request. Times are on `time.monotonic`'s clock."""

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
    def placed(self) -> float | None: ...

    @property
    def first_token(self) -> float | None: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def finish_reasons(self) -> list[str]: ...


class Tracing:
    """Makes the spans, on HTTP threads. The provider sends them from its own thread, which `stop` ends."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("levserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def export(self, record: TracedRequest, ended: float) -> None:
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
        for name, start, end in _stages(record, ended):
            child = self._tracer.start_span(name, context=inside, start_time=round(start * 1e9) + offset)
            child.end(round(end * 1e9) + offset)
        if record.status >= 500 or (record.status < 400 and record.error):
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(round(ended * 1e9) + offset)

    def stop(self) -> None:
        """Sends the remaining spans; waits at most `STOP_SECONDS` for a collector that does not answer."""
        thread = threading.Thread(target=self._provider.shutdown, name="levserve-tracing", daemon=True)
        thread.start()
        thread.join(STOP_SECONDS)


def start_tracing(destination: str) -> Tracing | None:
    """Sets up what --tracing asks for; None if it is off."""
    if destination == "off":
        return None
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _make_exporter(destination)
    except ImportError:
        raise ConfigError(f"--tracing {destination} needs OpenTelemetry: {INSTALL}") from None
    # `create` lets what it is given win over the environment, so the environment is read once more.
    resource = Resource.create({"service.name": "levserve"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _make_exporter(destination: str) -> SpanExporter:
    if destination == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter: SpanExporter = OTLPSpanExporter()
    return exporter


def _stages(record: TracedRequest, ended: float) -> list[tuple[str, float, float]]:
    """Name, start and end of each stage that the request reached."""
    starts = {"queue": record.submitted, "prefill": record.placed, "decode": record.first_token}
    stages = []
    end = ended
    for name, start in reversed(starts.items()):
        if start is not None:
            stages.append((name, start, end))
            end = start
    return stages[::-1]


def _attributes(record: TracedRequest) -> dict[str, str | int | list[str]]:
    """Named after OpenTelemetry's conventions for HTTP and for generative models."""
    values: dict[str, str | int | list[str] | None] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "levserve.request_id": record.request_id,
        "levserve.abort": record.abort,
        "error.type": record.error,
    }
    if record.submitted is not None:
        values |= {
            "gen_ai.response.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.response.finish_reasons": record.finish_reasons,
        }
    return {name: value for name, value in values.items() if value is not None}
