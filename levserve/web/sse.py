"""Answers a request with server-sent events. Runs on the HTTP thread of the stream.

The middle of a stream is written by the delivery thread (`relay.py`); pings fill long silences
(`heartbeat.py`).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Generator, Iterator

from flask import Response, request

from levserve.errors import ServeError
from levserve.generation import ClientGone, Deltas
from levserve.models.handle import ModelHandle
from levserve.request.schema import GenerationBody
from levserve.web.call import Call
from levserve.web.events import StreamEvents, StreamKind
from levserve.web.heartbeat import PING, Heartbeat
from levserve.web.relay import Relay
from levserve.web.run import Run

log = logging.getLogger(__name__)

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def stream_response(call: Call, body: GenerationBody, kind: StreamKind) -> Response:
    """A streamed answer, which outlives the view.

    A failure before the first ping is due gets its real status. If the model is still loading by then, the
    stream begins and waits for it, and a later failure is an event of the stream.
    """
    heartbeat = Heartbeat(call.settings.sse_heartbeat, call.request_log.started)
    is_chunked = request.environ.get("SERVER_PROTOCOL") == "HTTP/1.1"
    client = call.client if is_chunked else None
    handle = call.borrow(body.model)
    if call.wait(handle, heartbeat.seconds_left()):
        run = call.start(body, handle.model)
        run.deltas.wait(heartbeat.seconds_left())
        chunks = stream(run, kind, heartbeat, client)
    else:
        chunks = _wait_and_stream(call, handle, body, kind, heartbeat, client)
    response = Response(chunks, headers=HEADERS)
    call.close_with(response)
    return response


def stream(
    run: Run, kind: StreamKind, heartbeat: Heartbeat, client: socket.socket | None = None
) -> Iterator[bytes]:
    """The body of a stream. A failure after the 200 becomes an event.

    With a `client`, which must be receiving a chunked body, most events go directly to its socket and not
    through here. The last events go out in one write: each write releases the GIL, and other threads are
    waiting to take it.
    """
    request_log = run.request_log
    last = b""
    events = kind.begin(run)
    try:
        relay = None if client is None else Relay(client, events, heartbeat)
        last = yield from _events(run.deltas, events, heartbeat, relay)
        last += events.closing()
    except ClientGone as error:
        request_log.note_error(error)
        return
    except ServeError as error:
        request_log.note_error(error)
        last += events.failure(error)
    except OSError:  # from the client's socket
        raise
    except Exception:  # it is too late for the 500 handler
        log.exception("%s failed while streaming", request_log.request_id)
        request_log.error = "server_error"
        last += events.failure(ServeError("The server failed while it was answering."))
    yield last


def _wait_and_stream(
    call: Call,
    handle: ModelHandle,
    body: GenerationBody,
    kind: StreamKind,
    heartbeat: Heartbeat,
    client: socket.socket | None,
) -> Iterator[bytes]:
    """The stream of a model that is still loading: pings until it is loaded."""
    try:
        is_decided = False
        while not is_decided:
            yield PING
            heartbeat.restart()
            is_decided = call.wait(handle, heartbeat.seconds_left())
        run = call.start(body, handle.model)
    except ServeError as error:
        call.request_log.note_error(error)
        if isinstance(error, ClientGone):
            return
        yield kind.refusal(error)
        return
    except Exception:  # it is too late for the 500 handler
        log.exception("%s failed before its answer began", call.request_log.request_id)
        call.request_log.error = "server_error"
        yield kind.refusal(ServeError("The server failed while it was answering."))
        return
    yield from stream(run, kind, heartbeat, client)


def _events(
    deltas: Deltas, events: StreamEvents, heartbeat: Heartbeat, relay: Relay | None
) -> Generator[bytes, None, bytes]:
    """Yields the events of the choices; returns the last ones, to be sent together with what follows."""
    pending = events.opening()
    has_begun = False  # the response's head goes out with the first bytes; the relay must not write before it
    while True:
        if not heartbeat.wait_for(deltas, relay if has_begun and not pending else None):
            yield PING
        elif (found := next(deltas, None)) is None:
            return pending
        elif relay is not None and relay.send_rest():
            pass
        elif pending := pending + events.delta(*found):
            if deltas.is_ended:
                return pending
            yield pending
            pending = b""
        elif heartbeat.is_due():
            yield PING  # there are tokens, but their text is held back
        else:
            continue
        has_begun = True
        heartbeat.restart()
