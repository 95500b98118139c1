"""Streams an answer as server-sent events, with a sign of life where there is nothing to say.

Used on the HTTP thread of one stream.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Generator, Iterator

from msgspec import UNSET

from levserve.errors import ServeError
from levserve.generation import ClientGone, Deltas
from levserve.web.events import DONE, PING, Events, Heartbeat, error_event
from levserve.web.relay import Relay
from levserve.web.run import Run

log = logging.getLogger(__name__)

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def stream(
    run: Run,
    events: Events,
    heartbeat: Heartbeat,
    *,
    with_usage: bool,
    with_timings: bool,
    request_id: str,
    client: socket.socket | None = None,
) -> Iterator[bytes]:
    """The body of a stream. Whatever happens after the 200 is told in it, and it always ends with [DONE].

    With a `client`, who must be getting it chunked, its middle does not pass through here. The end goes out in one piece:
    every write lets go of the GIL, which others are waiting for.
    """
    last = b""
    try:
        last = yield from _events(
            run.deltas, events, heartbeat, None if client is None else Relay(client, events, heartbeat)
        )
        if with_usage or with_timings:
            last += events.closing(run.usage(), run.record.timings() if with_timings else UNSET)
    except ClientGone as error:
        run.record.note_error(error)
        return
    except ServeError as error:
        run.record.note_error(error)
        last += error_event(error)
    except OSError:  # of the client's socket
        raise
    except Exception:  # the 500 handler's part, where it is too late for a 500
        log.exception("%s failed while streaming", request_id)
        run.record.error = "server_error"
        last += error_event(ServeError("The server failed while it was answering."))
    yield last + DONE


def _events(
    deltas: Deltas, events: Events, heartbeat: Heartbeat, relay: Relay | None
) -> Generator[bytes, None, bytes]:
    """All events of the choices; gives back the last of them, which are to be sent with what follows."""
    pending = events.opening()
    has_begun = False  # the head of the answer goes out with its first bytes
    while True:
        if not heartbeat.wait_beside(deltas, relay if has_begun and not pending else None):
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
