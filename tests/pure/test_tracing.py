"""OpenTelemetry spans of requests: right parents, parts and times, and nothing while tracing is off."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from levserve.errors import ConfigError
from levserve.observe.tracing import Tracing, start_tracing
from tests.fake_app import App, serving
from tests.fake_server import ServerProcess, completion

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Traced:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    def take(self) -> list[ReadableSpan]:
        """The spans exported since the last call: the parts of a request, then the request."""
        spans = self._exporter.get_finished_spans()
        self._exporter.clear()
        return list(spans)


@pytest.fixture(scope="module")
def traced() -> Traced:
    return Traced()


@pytest.fixture(scope="module")
def app(traced: Traced) -> Iterator[App]:
    with serving(tracing=traced.tracing, request_timeout=30.0) as app:
        yield app
    traced.tracing.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_queue_its_prefill_and_its_decode_in_it(
    app: App, traced: Traced, stream: bool
) -> None:
    app.post("/v1/completions", completion("t17 t18", max_tokens=3, stream=stream))
    *parts, span = traced.take()
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert span.name == "POST /v1/completions" and span.kind.name == "SERVER" and span.parent is None
    for part in parts:
        assert part.parent is not None and part.parent.span_id == span.context.span_id
        assert part.context.trace_id == span.context.trace_id
    assert span.start_time <= parts[0].start_time
    for before, after in zip(parts, [*parts[1:], None]):
        assert before.start_time <= before.end_time == (span.end_time if after is None else after.start_time)
    attributes: Any = span.attributes
    assert attributes["gen_ai.response.model"] == "toy"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (2, 3)
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert (attributes["http.response.status_code"], attributes["http.route"]) == (200, "/v1/completions")
    assert not any("t17" in str(value) for value in attributes.values())


def test_a_request_is_part_of_the_trace_that_its_client_names(app: App, traced: Traced) -> None:
    app.client.get("/v1/models", headers=TRACEPARENT, buffered=True)
    (span,) = traced.take()
    assert (
        f"{span.context.trace_id:032x}" == TRACE
        and span.parent is not None
        and f"{span.parent.span_id:016x}" == PARENT
    )


@pytest.mark.parametrize(
    "given",
    [TRACEPARENT["traceparent"][:-1] + "0", "rubbish", "00-" + "0" * 32 + f"-{PARENT}-01", "x" * 5000],
)
def test_what_is_no_parent_or_is_not_sampled_makes_no_part_of_it(
    app: App, traced: Traced, given: str
) -> None:
    app.client.get("/v1/models", headers={"traceparent": given}, buffered=True)
    spans = traced.take()
    if given.startswith(f"00-{TRACE}"):
        assert spans == []  # the client did not sample this trace
    else:
        assert [span.parent for span in spans] == [None]


def test_a_refusal_has_a_span_without_parts(app: App, traced: Traced) -> None:
    app.post("/v1/completions", completion("t17", top_p=7))
    (span,) = traced.take()
    assert span.attributes is not None and span.attributes["http.response.status_code"] == 400
    assert span.status.is_ok or span.status.is_unset, "the client's mistake is not the server's"


def test_off_imports_nothing_and_costs_nothing() -> None:
    assert start_tracing("off") is None
    code = "import sys, levserve.server, levserve.web.sock; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


def test_a_missing_package_is_a_mistake_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"levserve\[otel\]"):
        start_tracing("otlp")


def test_a_server_tells_its_last_spans_before_it_leaves() -> None:
    with ServerProcess("--tracing", "console").wait_ready() as server:
        assert server.complete("t17", max_tokens=2).status == 200
    output = "\n".join(server.events)
    assert sorted(re.findall(r'^    "name": "(.*)"', output, re.MULTILINE)) == [
        "POST /v1/completions",
        "decode",
        "prefill",
        "queue",
    ]
    assert output.count('"service.name": "levserve"') == 4


@pytest.mark.parametrize(
    "variables, service_name",
    [
        ({}, "levserve"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test"}, "levserve"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=by-attribute"}, "by-attribute"),
        ({"OTEL_SERVICE_NAME": "by-name"}, "by-name"),
    ],
)
def test_spans_are_of_levserve_unless_the_environment_names_the_service(
    variables: dict[str, str], service_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracing = start_tracing("console")
    assert tracing is not None
    assert tracing._provider.resource.attributes["service.name"] == service_name
    tracing.stop()
