"""The Flask application around the fake device, in this process, and a simple client for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flask.testing import FlaskClient
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.test import TestResponse

from levserve.engine.engine import Engine
from levserve.models.registry import Registry
from levserve.observe.metrics import Metrics
from levserve.observe.tracing import Tracing
from levserve.settings.settings import Settings
from levserve.web.app import BATCHES, create_app
from levserve.web.watcher import Watcher
from tests.fake_device import FakeDevice
from tests.fake_server import completion


class App:
    """A running application; `device.requests` is what reached the device."""

    def __init__(self, client: FlaskClient, device: FakeDevice, registry: Registry) -> None:
        self.client = client
        self.device = device
        self.registry = registry
        self.engine = registry.engine

    def post(self, path: str, body: Any) -> TestResponse:
        return self.client.post(path, json=body, buffered=True)  # read and closed, as a server does it

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """The answer to a completion that must succeed."""
        reply = self.post("/v1/completions", completion(prompt, **fields))
        assert reply.status_code == 200, reply.text
        return reply.json

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The chunks of a stream that must end with [DONE]."""
        reply = self.post(path, body | {"stream": True})
        assert reply.status_code == 200, reply.text
        *events, done = [
            line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")
        ]
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    def refuse(self, path: str, body: Any) -> tuple[int, str | None]:
        """The status and the named field for a request that must be refused with an error object."""
        reply = self.post(path, body)
        assert reply.status_code >= 400, reply.text
        assert reply.json is not None and sorted(reply.json["error"]) == ["code", "message", "param", "type"]
        return reply.status_code, reply.json["error"]["param"]


@contextmanager
def serving(
    *,
    obeys: bool = True,
    max_inflight: int = 8,
    max_tokens: int = 0,
    tracing: Tracing | None = None,
    make_device: Callable[[Registry], FakeDevice] | None = None,
    **settings: Any,
) -> Iterator[App]:
    engine = Engine(max_inflight=max_inflight, max_tokens=max_tokens, metrics=Metrics())
    watcher = Watcher()
    registry = Registry(engine)
    device = make_device(registry) if make_device else FakeDevice(registry, obeys=obeys)
    device.start()
    app = create_app(registry, Settings(**settings), watcher, tracing)
    try:
        yield App(app.test_client(), device, registry)
    finally:
        app.extensions[BATCHES].close()
        engine.stop()
        device.join()
        watcher.stop()


class SilentHandler(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


@contextmanager
def wsgi_server(app: Any) -> Iterator[str]:
    """The address of a WSGI application in this process, for clients that need a socket."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=SilentHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
