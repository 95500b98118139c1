"""Answers a view's request with a stream, which outlives the view. Called on HTTP threads."""

from __future__ import annotations

from contextlib import ExitStack

from flask import Response, g

from levserve.config import Settings
from levserve.web import sse
from levserve.web.answer import Answer
from levserve.web.run import Run


def stream_response(
    run: Run, answer: Answer, held: ExitStack, settings: Settings, *, with_usage: bool = False, with_timings: bool = False
) -> Response:
    """What `held` holds is undone when the last byte is written or the client has gone."""
    events = sse.Events(answer, len(run.choices), with_usage=with_usage)
    heartbeat = sse.Heartbeat(settings.sse_heartbeat, run.record.started)
    heartbeat.wait_for(run.deltas)  # one that fails before its first token, and soon, gets a real status
    chunks = sse.stream(run, events, heartbeat, with_usage=with_usage, with_timings=with_timings, request_id=g.request_id)
    response = Response(chunks, headers=sse.HEADERS)
    response.call_on_close(held.pop_all().close)  # a generator that was never started runs no `finally`
    return response
