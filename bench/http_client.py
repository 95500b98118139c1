"""Sends requests over HTTP with the standard library alone, and splits event streams.

`load.py`, `ab.py` and others use it; it knows the protocol and nothing of what is asked.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

# ValueError: Ctrl-C shut a TLS socket while it was being read.
TRANSPORT_ERRORS = (
    OSError,
    http.client.HTTPException,
    ValueError,
)
TRANSPORT_KINDS = {TimeoutError: "timeout", http.client.IncompleteRead: "truncated"}
GET_SECONDS = 10


class WrongAnswer(Exception):
    """An answer that no client should be given; failures are counted by their `kind`."""

    def __init__(self, kind: str, message: str | bytes) -> None:
        super().__init__(shorten(message))
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is and how it is asked. The URL may end in /v1, so that an OPENAI_BASE_URL works as well."""

    url: str
    api_key: str | None = None
    timeout: float = 600.0


def connect(address: Address, timeout: float | None = None) -> http.client.HTTPConnection:
    parts = urlsplit(address.url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.netloc, timeout=address.timeout if timeout is None else timeout)
    connection.connect()
    return connection


def send(
    connection: http.client.HTTPConnection, address: Address, path: str, body: bytes | None = None
) -> http.client.HTTPResponse:
    prefix = urlsplit(address.url).path.rstrip("/").removesuffix("/v1")
    key = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
    headers = {"Content-Type": "application/json", **key}
    connection.request("POST" if body else "GET", prefix + path, body, headers)
    return connection.getresponse()


def get(address: Address, path: str) -> tuple[int, bytes, str | None]:
    """Returns status, body and what the server calls itself."""
    timeout = min(address.timeout, GET_SECONDS)
    with contextlib.closing(connect(address, timeout)) as connection:
        with send(connection, address, path) as response:
            return response.status, response.read(), response.getheader("Server")


def wait_ready(address: Address, seconds: float) -> None:
    """Waits for GET /readyz, or for /v1/models of a server that has no /readyz."""
    deadline, path = time.perf_counter() + seconds, "/readyz"
    while True:
        try:
            status = get(address, path)[0]
            if status == 200:
                return
            answer = f"GET {path} answers {status}"
            path = "/v1/models" if status == 404 else path
        except TRANSPORT_ERRORS as error:
            answer = str(error)
        if time.perf_counter() >= deadline:
            raise SystemExit(f"load.py: the server is not ready after {seconds:g} s: {answer}")
        time.sleep(0.1)


def first_model(address: Address) -> tuple[str, str | None]:
    """Returns the first of GET /v1/models and what the server calls itself; raises ValueError if it names none."""
    try:
        status, body, software = get(address, "/v1/models")
        if status != 200:
            raise ValueError(f"{status} {shorten(body)}")
        return json.loads(body)["data"][0]["id"], software
    except (*TRANSPORT_ERRORS, LookupError, TypeError) as error:
        raise ValueError(f"GET /v1/models of {address.url} names no model: {error!r}") from error


class EventStream:
    """Splits a stream of server-sent events into the data of each, as OpenAI's SDKs do."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    @property
    def is_inside_event(self) -> bool:
        return bool(self._data or self._tail)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yields the data of each event that this piece completes."""
        *lines, self._tail = (self._tail + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event
            elif line and not line.startswith(b":"):  # OpenAI's SDK fails on event:, id: and retry: lines
                raise WrongAnswer("malformed", b"a line is neither data nor a comment: " + line)


def shorten(text: str | bytes) -> str:
    text = " ".join((text.decode(errors="replace") if isinstance(text, bytes) else text).split())
    return text if len(text) <= 240 else text[:240] + "..."
