"""Stores on loopback: Google's in an emulator, Amazon's in moto, and a web server that can misbehave."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def google_store() -> Iterator[Any]:
    """A filesystem on an emulated Google store with the bucket `models`, to which the environment points."""
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="models")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server._api._httpd.server_address[1]}")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        import gcsfs

        try:
            yield gcsfs.GCSFileSystem(token="anon", project="test")
        finally:
            gcsfs.GCSFileSystem.clear_instance_cache()
            server.stop()


@contextmanager
def amazon_store() -> Iterator[Any]:
    """The same on moto's server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name, value in {
            "ACCESS_KEY_ID": "test",
            "SECRET_ACCESS_KEY": "test",
            "DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(f"AWS_{name}", value)
        import s3fs

        try:
            files = s3fs.S3FileSystem(skip_instance_cache=True)
            if files.exists("models"):  # moto keeps what an earlier server of this process had
                files.rm("models", recursive=True)
            files.mkdir("models")
            yield files
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()


class WebServer(ThreadingHTTPServer):
    """Serves a folder. `asked` are the ranges that were asked for; the switches are the ways to misbehave."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), WebHandler)
        self.folder = folder
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[str] = []
        self.has_ranges = True
        self.serves_urllib = True
        self.has_listings = True
        self.fails_after: int | None = None  # this many ranges
        self.gate: threading.Barrier | None = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing about clients that hung up."""


class WebHandler(SimpleHTTPRequestHandler):
    server: WebServer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, directory=str(args[2].folder), **kwargs)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_dir() and self.server.has_listings:
            super().do_GET() if with_body else super().do_HEAD()
            return
        if not path.is_file():
            self.send_error(404)
            return
        if "Python-urllib" in self.headers.get("User-Agent", "") and not self.server.serves_urllib:
            self.send_error(403)
            return
        data = path.read_bytes()
        asked = self.headers.get("Range") if self.server.has_ranges else None
        if asked and asked != "bytes=0-0" and with_body:
            self.server.asked.append(asked)
            if self.server.fails_after is not None and len(self.server.asked) > self.server.fails_after:
                self.send_error(503)
                return
            if self.server.gate is not None:
                self.server.gate.wait(timeout=20)
        size = len(data)
        first, last = (
            (int(number) for number in asked.removeprefix("bytes=").split("-")) if asked else (0, size - 1)
        )
        data = data[first : last + 1]
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        if self.server.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def web_store(folder: Path) -> Iterator[WebServer]:
    server = WebServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def upload(files: Any, folder: Path, target: str) -> None:
    """Puts every file of a folder into a store."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            files.pipe_file(f"{target}/{path.relative_to(folder)}", path.read_bytes())
