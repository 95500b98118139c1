"""/v1/ws: the streaming endpoints over a WebSocket. Who may open one, and how it ends; what is said is `conversation.py`'s.

Each socket keeps one HTTP thread, which sends, and has a reader thread of simple-websocket's, so there are few of them. Who
may open a socket is decided before the upgrade, where a refusal is an ordinary answer. When the view ends, the reader thread
has ended and the socket is closed: gunicorn finds nothing left to do.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from flask import Blueprint, Flask, Response, g, request
from flask_sock import Sock
from simple_websocket import ConnectionClosed, Server
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError

from levserve.engine.engine import Engine
from levserve.errors import BadRequest, Unavailable, UpgradeRequired
from levserve.observe.health import Phase
from levserve.observe.tracing import Tracing
from levserve.settings.settings import Settings
from levserve.web.conversation import MAX_WAITING, Conversation
from levserve.web.cors import Cors
from levserve.web.hijack import PATH, HijackedSocket
from levserve.web.run import Runs

log = logging.getLogger(__name__)

SUBPROTOCOL = "levserve"  # a page that names the key as a subprotocol must name one that we can agree to
VERSION = "13"  # of the WebSocket protocol, the only one there is
PING_SECONDS = 25
CLOSE_SECONDS = 2.0  # for the peer's answer to our close
GONE = (
    ConnectionClosed,
    LocalProtocolError,
    OSError,
)  # what simple-websocket raises once a socket is closing


class Sockets:
    """Who may open a WebSocket, and how many; shared by all HTTP threads."""

    def __init__(
        self, engine: Engine, settings: Settings, runs: Runs, cors: Cors, tracing: Tracing | None
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._runs = runs
        self._cors = cors
        self._tracing = tracing
        self._places = threading.BoundedSemaphore(settings.max_sockets)

    def install(self, app: Flask) -> None:
        app.config["SOCK_SERVER_OPTIONS"] = {
            "ping_interval": PING_SECONDS,
            "max_message_size": self._settings.max_body_bytes,
            "subprotocols": SUBPROTOCOL,
        }
        routes = Blueprint("sock", __name__)
        routes.before_request(self._admit)
        routes.after_request(_count_as_upgraded)
        routes.teardown_request(self._release)
        Sock().route(PATH, bp=routes)(self._serve)
        app.register_blueprint(routes)

    def _admit(self) -> None:
        """Before the upgrade: whoever is refused here gets an ordinary answer."""
        self._cors.check_origin()
        if request.headers.get("Sec-WebSocket-Version") != VERSION:
            raise UpgradeRequired(f"This server speaks version {VERSION} of the WebSocket protocol.")
        for name in ("Host", "Sec-WebSocket-Key"):
            if not request.headers.get(name):
                raise BadRequest(f"A WebSocket needs the header {name}.")
        if self._engine.phase is not Phase.READY:
            raise Unavailable(
                f"The server opens no WebSockets while it is {self._engine.phase}.", retry_after_seconds=5.0
            )
        if not self._places.acquire(blocking=False):
            self._engine.metrics.refused.labels("sockets_full").inc()
            most = self._settings.max_sockets
            raise Unavailable(
                f"The server is at its limit of {most} WebSockets; please try again.", retry_after_seconds=5.0
            )
        g.has_socket_place = True
        request.environ["gunicorn.socket"] = HijackedSocket(request.environ["gunicorn.socket"])
        # Compression would be agreed to: work for nothing on frames this small, and a way to send very much in few bytes.
        request.environ.pop("HTTP_SEC_WEBSOCKET_EXTENSIONS", None)

    def _release(self, error: BaseException | None) -> None:
        if g.pop("has_socket_place", False):
            self._places.release()

    def _serve(self, ws: Server) -> None:
        """The view, after the upgrade: nothing may leave it but by the socket, on which Flask would write an HTTP answer."""
        g.is_upgraded = True
        ws.sock.read_while(lambda: len(ws.input_buffer) < MAX_WAITING)
        conversation = Conversation(ws, self._engine, self._settings, self._runs, self._tracing, g.request_id)
        log.info("%s opens %s", g.request_id, PATH)
        with self._engine.metrics.websockets.track_inprogress():
            try:
                conversation.run()
            except GONE:
                pass
            except Exception:  # the 500 handler's part, where it is too late for a 500
                log.exception("%s failed on %s", g.request_id, PATH)
                with suppress(*GONE):
                    ws.close(CloseReason.INTERNAL_ERROR, "The server failed.")
            finally:
                _end(ws)
        log.info("%s leaves %s after %d requests", g.request_id, PATH, conversation.num_requests)


def _count_as_upgraded(response: Response) -> Response:
    """Nobody gets this response once there is a socket; but it is counted."""
    if g.get("is_upgraded"):
        response.status_code = 101
    return response


def _end(ws: Server) -> None:
    """Closes the socket if it is open, and waits for the end of its reader thread, which gives the descriptor back."""
    with suppress(*GONE):
        ws.close()
    ws.thread.join(CLOSE_SECONDS)
    ws.sock.hang_up()
    ws.thread.join()
