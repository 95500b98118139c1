"""Answers the requests on one WebSocket, one after another.

A client sends a request's body as a text frame, with the endpoint's `path` in it, and an `id` if it may want
to cancel. It gets the chunks that the same request would get as server-sent events, as text frames, up to
"[DONE]". A faulty request gets an error frame before "[DONE]", and the socket stays open. `{"cancel": id}`
ends a request early: the HTTP thread that sends looks for new frames between two chunks and, while there are
no chunks, every tenth of a second.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
from msgspec import Raw, Struct
from simple_websocket import ConnectionClosed, Server
from wsproto.frame_protocol import CloseReason

from levserve.answers.answer import Answer
from levserve.batch.endpoints import GENERATING
from levserve.errors import BadRequest, NotFound, ServeError
from levserve.observe.health import Phase
from levserve.observe.tracing import Tracing
from levserve.request.decode import decode, missing
from levserve.request.schema import GenerationBody
from levserve.web import sse
from levserve.web.call import Call, Calls
from levserve.web.events import ChunkStream
from levserve.web.heartbeat import Heartbeat
from levserve.web.hijack import PATH
from levserve.web.request_log import RequestLog

IDLE_SECONDS = 0.5  # a socket without a request notices within this time that the server is shutting down
TICK_SECONDS = 0.1  # a request that waits for tokens notices a cancel or a hang-up within this time
MAX_WAITING = 16  # requests on one socket; together they may be as large as one body


class Cancelled(ServeError):
    """The client cancelled its request."""

    status = 499
    type = "invalid_request_error"
    code = "request_cancelled"


class Frame(Struct, frozen=True):
    """The fields of a frame besides the body of its endpoint."""

    path: str | None = None
    id: str | None = None
    cancel: str | None = None
    stream: bool | None = None


@dataclass(slots=True)
class Request:
    """A frame that is to be answered; `frame` is an error if it could not be decoded."""

    data: bytes
    frame: Frame | BadRequest
    is_cancelled: bool = False

    @property
    def id(self) -> str | None:
        return self.frame.id if isinstance(self.frame, Frame) else None

    @property
    def path(self) -> str:
        """The endpoint, or "-" if there is no such endpoint."""
        path = self.frame.path if isinstance(self.frame, Frame) else None
        return path if path in GENERATING else "-"

    def read(self) -> tuple[GenerationBody, type[Answer]]:
        """The body and the kind of its answer; raises `BadRequest` or `NotFound`."""
        if isinstance(self.frame, BadRequest):
            raise self.frame
        if self.frame.path is None:
            raise missing("path")
        if self.frame.path not in GENERATING:
            raise NotFound(
                f"A WebSocket has no path '{self.frame.path[:64]}'; it has {' and '.join(GENERATING)}.",
                param="path",
            )
        if self.frame.stream is False:
            raise BadRequest("A WebSocket always streams; leave 'stream' out.", param="stream")
        body_kind, answer_kind = GENERATING[self.frame.path]
        fields = msgspec.json.decode(self.data, type=dict[str, Raw])
        return decode(msgspec.json.encode({**fields, "stream": True}), body_kind), answer_kind

    def check(self) -> None:
        if self.is_cancelled:
            raise Cancelled("The request was cancelled.")


class Conversation:
    """The requests of one socket. Belongs to the socket's HTTP thread."""

    def __init__(self, ws: Server, calls: Calls, tracing: Tracing | None, request_id: str) -> None:
        self._ws = ws
        self._calls = calls
        self._engine = calls.engine
        self._max_bytes = calls.settings.max_body_bytes
        self._tracing = tracing
        self._request_id = request_id
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self.num_requests = 0

    def run(self) -> None:
        """Answers requests in the order they come, until the peer hangs up or the server shuts down."""
        while self._engine.phase is Phase.READY:
            self._receive(0 if self._waiting else IDLE_SECONDS)
            if self._waiting:
                self._current = self._waiting.popleft()
                self._answer(self._current)
                self._current = None
        self._ws.close(CloseReason.GOING_AWAY, "The server is shutting down.")

    def _receive(self, timeout_seconds: float) -> None:
        """Takes the frames that have come; waits this long for the first. Raises if the socket has closed."""
        message = self._ws.receive(timeout=timeout_seconds)
        while message is not None:
            self._take(message)
            message = self._ws.receive(timeout=0)
        if not self._ws.thread.is_alive():
            raise ConnectionClosed

    def _take(self, message: str | bytes) -> None:
        """A cancel takes effect at once; every other frame waits for its turn, so that answers never mix."""
        if isinstance(message, bytes):
            self._enqueue(Request(message, BadRequest("Send text frames.")))
            return
        data = message.encode()
        if len(data) > self._max_bytes:  # the library counted characters, not bytes
            self._ws.close(CloseReason.MESSAGE_TOO_BIG, "Message is too big")
            raise ConnectionClosed
        try:
            frame = decode(data, Frame)
        except BadRequest as error:
            self._enqueue(Request(data, error))
            return
        if frame.cancel is None:
            self._enqueue(Request(data, frame))
            return
        for one in (self._current, *self._waiting):
            if one is not None and one.id == frame.cancel:  # a request that is not here has ended already
                one.is_cancelled = True

    def _enqueue(self, one: Request) -> None:
        num_bytes = sum(len(other.data) for other in (one, *self._waiting))
        if len(self._waiting) == MAX_WAITING or num_bytes > self._max_bytes:
            self._ws.close(CloseReason.POLICY_VIOLATION, "Too many requests are waiting")
            raise ConnectionClosed
        self._waiting.append(one)

    def _answer(self, one: Request) -> None:
        self.num_requests += 1
        request_id = f"{self._request_id}-{self.num_requests}"
        request_log = RequestLog(request_id, "WS", f"{PATH} {one.path}", route=PATH)
        request_log.begin()
        status = 200
        try:
            with Call(self._calls, request_log) as call:
                self._stream(one, call)
        except ServeError as error:
            status = error.status
            request_log.note_error(error)
            self._ws.send(error.body().decode())
            self._ws.send("[DONE]")
        finally:
            self._engine.metrics.requests.labels(PATH, status).inc()
            request_log.end(status, self._engine.metrics, self._tracing)

    def _stream(self, one: Request, call: Call) -> None:
        one.check()
        call.reserve(len(one.data))
        body, answer_kind = one.read()
        call.set_deadline(body.timeout)
        handle = call.borrow(body.model)
        while not call.wait(handle, TICK_SECONDS):
            self._receive(0)
            one.check()
        run = call.start(body, handle.model)
        ticks = Heartbeat(TICK_SECONDS, call.request_log.started)
        for chunk in sse.stream(run, ChunkStream(answer_kind), ticks):
            for event in chunk.decode().split("\n\n"):
                if event.startswith("data: "):  # the others are pings, and a WebSocket has its own
                    self._ws.send(event.removeprefix("data: "))
            self._receive(0)
            one.check()
