"""What is said on one WebSocket: requests in, chunks out, one request after another.

A client sends a request's body as a text frame, with the endpoint's `path` in it and an `id` if it may want to cancel it, and
gets the chunks of the same request's server-sent events as text frames, up to "[DONE]". Whatever is wrong with a request is
told in an error frame before that, and the socket stays open. `{"cancel": id}` ends a request early: the HTTP thread that
sends looks at what has come between two chunks and, where none come, every tenth of a second.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
from msgspec import Raw, Struct
from simple_websocket import ConnectionClosed, Server
from wsproto.frame_protocol import CloseReason

from levserve.engine.engine import Engine
from levserve.errors import BadRequest, NotFound, ServeError
from levserve.observe.health import Phase
from levserve.observe.tracing import Tracing
from levserve.settings.settings import Settings
from levserve.web import sse
from levserve.web.answer import Answer, ChatAnswer, TextAnswer
from levserve.web.events import Events, Heartbeat
from levserve.web.hijack import PATH
from levserve.web.json_body import decode
from levserve.web.request_log import RequestLog
from levserve.web.run import Runs
from levserve.web.schema import ChatBody, CompletionBody

ENDPOINTS: dict[str, tuple[type[ChatBody] | type[CompletionBody], type[Answer]]] = {
    "/v1/chat/completions": (ChatBody, ChatAnswer),
    "/v1/completions": (CompletionBody, TextAnswer),
}
IDLE_SECONDS = 0.5  # until a socket without a request notices that the server is leaving
TICK_SECONDS = 0.1  # until one that waits for tokens notices a cancel, or that its peer has gone
MAX_WAITING = 16  # requests on one socket; all of them together are no larger than one may be


class Cancelled(ServeError):
    """The client took its request back."""

    status = 499
    type = "invalid_request_error"
    code = "request_cancelled"


class Frame(Struct, frozen=True):
    """What a message says besides the body of its endpoint."""

    path: str | None = None
    id: str | None = None
    cancel: str | None = None
    stream: bool | None = None


@dataclass(slots=True)
class Request:
    """One message that is to be answered."""

    message: bytes
    frame: Frame | BadRequest
    is_cancelled: bool = False

    @property
    def id(self) -> str | None:
        return self.frame.id if isinstance(self.frame, Frame) else None

    def read(self) -> tuple[ChatBody | CompletionBody, type[Answer]]:
        """The body and the kind of its answer; raises what is wrong with the message."""
        if isinstance(self.frame, BadRequest):
            raise self.frame
        if self.frame.path is None:
            raise BadRequest(
                "Missing required parameter: 'path'.", param="path", code="missing_required_parameter"
            )
        if self.frame.path not in ENDPOINTS:
            raise NotFound(
                f"A WebSocket has no path '{self.frame.path[:64]}'; it has {' and '.join(ENDPOINTS)}.",
                param="path",
            )
        if self.frame.stream is False:
            raise BadRequest("A WebSocket always streams; leave 'stream' out.", param="stream")
        body_kind, answer_kind = ENDPOINTS[self.frame.path]
        fields = msgspec.json.decode(self.message, type=dict[str, Raw])
        return decode(msgspec.json.encode({**fields, "stream": True}), body_kind), answer_kind


class Conversation:
    """What is said on one socket. Belongs to its HTTP thread."""

    def __init__(
        self,
        ws: Server,
        engine: Engine,
        settings: Settings,
        runs: Runs,
        tracing: Tracing | None,
        request_id: str,
    ) -> None:
        self._ws = ws
        self._engine = engine
        self._max_bytes = settings.max_body_bytes
        self._runs = runs
        self._tracing = tracing
        self._request_id = request_id
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self.num_requests = 0

    def run(self) -> None:
        """Answers requests in the order they come, until the peer or the server leaves."""
        while self._engine.phase is Phase.READY:
            self._receive(0 if self._waiting else IDLE_SECONDS)
            if self._waiting:
                self._current = self._waiting.popleft()
                self._answer(self._current)
                self._current = None
        self._ws.close(CloseReason.GOING_AWAY, "The server is shutting down.")

    def _receive(self, timeout_seconds: float) -> None:
        """Takes what has come, waiting this long for the first; raises one of `GONE` if the socket has closed."""
        message = self._ws.receive(timeout=timeout_seconds)
        while message is not None:
            self._take(message)
            message = self._ws.receive(timeout=0)
        if not self._ws.thread.is_alive():
            raise ConnectionClosed

    def _take(self, message: str | bytes) -> None:
        """A cancel strikes at once; everything else waits for its turn, so that answers never mix."""
        if isinstance(message, bytes):
            self._wait_in_line(Request(message, BadRequest("Send text frames.")))
            return
        data = message.encode()
        if len(data) > self._max_bytes:  # the library has counted characters
            self._ws.close(CloseReason.MESSAGE_TOO_BIG, "Message is too big")
            raise ConnectionClosed
        try:
            frame = decode(data, Frame)
        except BadRequest as error:
            self._wait_in_line(Request(data, error))
            return
        if frame.cancel is None:
            self._wait_in_line(Request(data, frame))
        else:
            for one in (self._current, *self._waiting):
                if one is not None and one.id == frame.cancel:
                    one.is_cancelled = True  # one that is not here has ended: the cancel came too late

    def _wait_in_line(self, one: Request) -> None:
        num_bytes = sum(len(other.message) for other in (one, *self._waiting))
        if len(self._waiting) == MAX_WAITING or num_bytes > self._max_bytes:
            self._ws.close(CloseReason.POLICY_VIOLATION, "Too many requests are waiting")
            raise ConnectionClosed
        self._waiting.append(one)

    def _answer(self, one: Request) -> None:
        self.num_requests += 1
        path = one.frame.path if isinstance(one.frame, Frame) and one.frame.path in ENDPOINTS else "-"
        record = RequestLog(f"{self._request_id}-{self.num_requests}", "WS", f"{PATH} {path}", route=PATH)
        status = 200
        try:
            self._stream(one, record)
        except ServeError as error:
            status = error.status
            record.note_error(error)
            self._ws.send(error.body().decode())
            self._ws.send("[DONE]")
        finally:
            self._engine.metrics.requests.labels(PATH, status).inc()
            record.end(status, self._engine.metrics, self._tracing)

    def _stream(self, one: Request, record: RequestLog) -> None:
        with ExitStack() as held:
            self._check(one)
            reservation = held.enter_context(self._engine.reserve(len(one.message)))
            body, answer_kind = one.read()
            deadline = self._runs.deadline(record.started, body.timeout)
            handle = held.enter_context(self._runs.registry.borrow(body.model))
            while not handle.wait(TICK_SECONDS) and (deadline is None or time.monotonic() < deadline):
                self._receive(0)
                self._check(one)
            model = handle.model
            run = self._runs.start(
                body, model, reservation, held, record=record, deadline=deadline, client=None
            )
            events = Events(answer_kind(model), len(run.choices), with_usage=body.wants_usage)
            ticks = Heartbeat(TICK_SECONDS, record.started)
            chunks = sse.stream(
                run,
                events,
                ticks,
                with_usage=body.wants_usage,
                with_timings=body.timings is True,
                request_id=record.request_id,
            )
            for chunk in chunks:
                for event in chunk.decode().split("\n\n"):
                    if event.startswith("data: "):  # the rest are signs of life, which pings are for here
                        self._ws.send(event.removeprefix("data: "))
                self._receive(0)
                self._check(one)

    def _check(self, one: Request) -> None:
        if one.is_cancelled:
            raise Cancelled("The request was cancelled.")
