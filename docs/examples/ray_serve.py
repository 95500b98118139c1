"""levserve on a Ray cluster: every replica of a Ray Serve deployment runs a levserve and passes requests on to it.

pip install 'ray[serve]' levserve, on every node; then, in this folder:

    serve run ray_serve:app replicas=2 command="levserve --model smollm2-135m"
    serve run ray_serve:app replicas=2 gpus=1 command="levserve --model Qwen/Qwen3-0.6B"

All of levserve's paths except the WebSocket are then at http://127.0.0.1:8000, including streams.
"""

import os
import shlex
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import AsyncIterator

import aiohttp
from pydantic import BaseModel
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

DRAIN_SECONDS = 30
# Headers that belong to one connection, or that the proxy adds itself.
DROPPED = {
    "connection",
    "content-length",
    "date",
    "host",
    "keep-alive",
    "server",
    "transfer-encoding",
    "upgrade",
}


@serve.deployment(
    max_ongoing_requests=512,  # levserve has a queue of its own, and refuses with 429 when it is full
    graceful_shutdown_timeout_s=DRAIN_SECONDS,
    health_check_period_s=5,
)
class Levserve:
    """Owns a levserve process, and dies with it: Ray then starts a new replica."""

    def __init__(self, command: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        flags = ["--host", "127.0.0.1", "--port", str(port), "--drain-seconds", str(DRAIN_SECONDS)]
        self.process = subprocess.Popen([*shlex.split(command), *flags])
        # A replica without its server would answer fastest of all, with errors, and be given the most requests until a
        # health check fails.
        threading.Thread(target=self._follow_process, daemon=True).start()
        while not self._is_ready():
            time.sleep(0.2)
        self.session: aiohttp.ClientSession | None = None

    def _follow_process(self) -> None:
        self.process.wait()
        os._exit(1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    async def check_health(self) -> None:
        async with self._client().get(f"{self.url}/healthz") as answer:
            answer.raise_for_status()

    async def __call__(self, request: Request) -> Response:
        target = self.url + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name not in DROPPED}
        answer = await self._client().request(
            request.method, target, data=await request.body(), headers=headers, allow_redirects=False
        )
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in DROPPED}
        return StreamingResponse(pass_on(answer), answer.status, kept)

    def _client(self) -> aiohttp.ClientSession:
        if self.session is None:  # made inside the event loop; all timeouts are levserve's
            limits = {
                "timeout": aiohttp.ClientTimeout(total=None),
                "connector": aiohttp.TCPConnector(limit=0),
            }
            self.session = aiohttp.ClientSession(auto_decompress=False, **limits)
        return self.session

    def __del__(self) -> None:
        self.process.terminate()  # levserve drains


async def pass_on(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Ends early when the client leaves: the connection is closed, and levserve cancels the request."""
    try:
        async for piece in answer.content.iter_any():
            yield piece
    finally:
        answer.close()


class Arguments(BaseModel):
    command: str = "levserve"
    replicas: int = 2
    gpus: float = 0


def app(arguments: Arguments) -> serve.Application:
    """What `serve run` calls with the arguments after its name."""
    resources = {"num_cpus": 1, "num_gpus": arguments.gpus}
    deployment = Levserve.options(num_replicas=arguments.replicas, ray_actor_options=resources)
    return deployment.bind(arguments.command)
