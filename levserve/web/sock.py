"""Opens and closes WebSockets on /v1/ws; `conversation.py` answers the requests on them.

Each socket occupies an HTTP thread, which sends, and a reader thread of simple-websocket, so the number of
sockets is limited. A client is refused before the upgrade, while an ordinary HTTP answer is possible. When
the view ends, the reader thread has ended and the socket is closed: nothing is left for gunicorn to do.
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

from levserve.errors import BadRequest, Unavailable, UpgradeRequired
from levserve.observe.health import Phase
from levserve.observe.tracing import Tracing
from levserve.web.call import Calls
from levserve.web.conversation import MAX_WAITING, Conversation
from levserve.web.cors import Cors
from levserve.web.hijack import PATH, HijackedSocket

log = logging.getLogger(__name__)

# A page that sends its key as a subprotocol must also offer one that the server can accept.
SUBPROTOCOL = "levserve"
VERSION = "13"  # the only version of the WebSocket protocol
PING_SECONDS = 25
CLOSE_SECONDS = 2.0  # for the peer to answer a close
# simple-websocket raises these once a socket is closing.
GONE = (ConnectionClosed, LocalProtocolError, OSError)


class Sockets:
    """Decides which clients may open a WebSocket, and counts them; shared by all HTTP threads."""

    def __init__(self, calls: Calls, cors: Cors, tracing: Tracing | None) -> None:
        self._calls = calls
        self._engine = calls.engine
        self._settings = calls.settings
        self._cors = cors
        self._tracing = tracing
        self._places = threading.BoundedSemaphore(calls.settings.max_sockets)

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
        """Runs before the upgrade: a client that is refused here gets an ordinary answer."""
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
        # The library would accept compression: wasted work on small frames, and a few bytes could unpack to
        # very many.
        request.environ.pop("HTTP_SEC_WEBSOCKET_EXTENSIONS", None)

    def _release(self, error: BaseException | None) -> None:
        if g.pop("has_socket_place", False):
            self._places.release()

    def _serve(self, ws: Server) -> None:
        """The view, after the upgrade. It must not raise: Flask would write an HTTP answer to the socket."""
        g.is_upgraded = True
        request_id = g.request_log.request_id
        ws.sock.read_while(lambda: len(ws.input_buffer) < MAX_WAITING)
        conversation = Conversation(ws, self._calls, self._tracing, request_id)
        log.info("%s opened %s", request_id, PATH)
        with self._engine.metrics.websockets.track_inprogress():
            try:
                conversation.run()
            except GONE:
                pass
            except Exception:  # it is too late for the 500 handler
                log.exception("%s failed on %s", request_id, PATH)
                with suppress(*GONE):
                    ws.close(CloseReason.INTERNAL_ERROR, "The server failed.")
            finally:
                _end(ws)
        log.info("%s closed %s after %d requests", request_id, PATH, conversation.num_requests)


def _count_as_upgraded(response: Response) -> Response:
    """After an upgrade the client never gets this response, but the metrics count it."""
    if g.get("is_upgraded"):
        response.status_code = 101
    return response


def _end(ws: Server) -> None:
    """Closes the socket if it is open, and waits for its reader thread, which closes the descriptor."""
    with suppress(*GONE):
        ws.close()
    ws.thread.join(CLOSE_SECONDS)
    ws.sock.hang_up()
    ws.thread.join()
