"""Answers a view's request with a stream, which outlives the view. Called on HTTP threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from flask import Response, g, request

from levserve.engine.served_model import ServedModel
from levserve.errors import ServeError
from levserve.models.handle import ModelHandle
from levserve.settings.settings import Settings
from levserve.web import sse
from levserve.web.answer import Answer
from levserve.web.events import DONE, PING, Events, Heartbeat, error_event
from levserve.web.request_log import RequestLog
from levserve.web.run import Run


def stream_response(
    handle: ModelHandle,
    begin: Callable[[ServedModel], Run],
    answer_kind: type[Answer],
    held: ExitStack,
    settings: Settings,
    *,
    deadline: float | None,
    with_usage: bool = False,
    with_timings: bool = False,
) -> Response:
    """What `held` holds is undone when the last byte is written or the client has gone.

    What fails soon gets a real status. A model that is still loading when a sign of life is due is waited for in the stream,
    and what fails then is told there.
    """
    record: RequestLog = g.record
    heartbeat = Heartbeat(settings.sse_heartbeat, record.started)
    is_chunked = request.environ.get("SERVER_PROTOCOL") == "HTTP/1.1"
    client = request.environ.get("gunicorn.socket") if is_chunked else None

    def stream(run: Run) -> Iterator[bytes]:
        events = Events(answer_kind(handle.model), len(run.choices), with_usage=with_usage)
        return sse.stream(
            run,
            events,
            heartbeat,
            with_usage=with_usage,
            with_timings=with_timings,
            request_id=record.request_id,
            client=client,
        )

    if heartbeat.wait_for(handle, deadline):
        run = begin(handle.model)
        heartbeat.wait_for(run.deltas)
        chunks = stream(run)
    else:
        chunks = _wait_and_stream(handle, lambda: stream(begin(handle.model)), heartbeat, record, deadline)
    response = Response(chunks, headers=sse.HEADERS)
    response.call_on_close(held.pop_all().close)  # a generator that was never started runs no `finally`
    return response


def _wait_and_stream(
    handle: ModelHandle,
    begin: Callable[[], Iterator[bytes]],
    heartbeat: Heartbeat,
    record: RequestLog,
    deadline: float | None,
) -> Iterator[bytes]:
    yield PING
    heartbeat.restart()
    while not heartbeat.wait_for(handle, deadline):
        yield PING
        heartbeat.restart()
    try:
        chunks = begin()
    except ServeError as error:
        record.note_error(error)
        yield error_event(error) + DONE
    else:
        yield from chunks
