"""Runs the application under gunicorn: one arbiter, one worker process for life, a pool of HTTP threads in it.

`serve` is called by `cli.main` in the process that becomes the arbiter, which imports no jax: the device thread is born in
the worker, after the fork. The worker's end is the server's end: 0 after a drain, the error's own code when the model
cannot be served (1 or 2), 70 for anything else.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from types import FrameType
from typing import Any, NoReturn

from flask import Flask
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from gunicorn.glogging import Logger
from gunicorn.http.errors import (
    ExpectationFailed,
    InvalidResponseHeader,
    InvalidResponseHeaderName,
    LimitRequestHeaders,
    LimitRequestLine,
    ParseException,
)
from gunicorn.workers.gthread import ThreadWorker

from levserve.config import KEY_VARIABLE, OTHER_KEY_VARIABLE, Settings
from levserve.engine.engine import Engine, Phase
from levserve.errors import BadRequest, ServeError, StartupError
from levserve.metrics import Metrics
from levserve.web.answer import error_body
from levserve.web.app import create_app
from levserve.web.watcher import Watcher

log = logging.getLogger(__name__)

StartDevice = Callable[[Settings, Engine], threading.Thread]

FAULT = 70  # EX_SOFTWARE; systemd restarts on it
ACCELERATORS = ("/dev/nvidiactl", "/dev/accel0", "/dev/vfio/0")  # NVIDIA's driver, and TPUs
QUIET_PATHS = ("/health", "/healthz", "/readyz", "/metrics")  # asked every few seconds; logged at debug level
SPARE_THREADS = 16  # for health, metrics and refusals while every place is taken
IDLE_CONNECTIONS = 1000
BACKLOG = 2048
EXIT_SECONDS = 5  # from the end of a drain to the end of the process
MAX_QUOTED = 200  # of what a client sent, in the answer that refuses it
PARSER_STATUS = {
    LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    ExpectationFailed: HTTPStatus.EXPECTATION_FAILED,
}
JOIN_SECONDS = 3.0  # a device thread that is inside a compile cannot be told to stop


def serve(settings: Settings, start_device: StartDevice) -> NoReturn:
    """Serves until a signal ends it; raises `StartupError` if it cannot listen, else `SystemExit` in both processes."""
    listener = listen(settings.host, settings.port)
    url = _url(listener)
    log.info("listening on %s, loading %s", url, settings.model)
    Application(settings, listener, url, start_device).run()
    raise AssertionError("the arbiter ends with SystemExit")


def resolve_rows(settings: Settings) -> Settings:
    """Fills in the limits that were left to us. Everything after this, the engine too, reads them from the settings.

    The size of the thread pool depends on them, so they are chosen before jax can tell what the device is.
    """
    has_accelerator = settings.device in ("gpu", "tpu") or (settings.device == "auto" and any(map(os.path.exists, ACCELERATORS)))
    rows = settings.max_running or (256 if has_accelerator else 32)
    return replace(settings, max_running=rows, max_waiting=settings.max_waiting or 4 * rows)


def num_threads(settings: Settings) -> int:
    """HTTP threads: one for every request that may run or wait and every WebSocket, and some that are always free."""
    return settings.max_running + settings.max_waiting + settings.max_sockets + SPARE_THREADS


def listen(host: str, port: int) -> socket.socket:
    """Opens the port before anything slow is done; gunicorn would try five times over five seconds."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python adds the address, which we have said
        raise StartupError(f"cannot listen on {host}:{port}: {reason}") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it; events are small and must not wait
    return listener


class Application(BaseApplication):  # type: ignore[misc]
    """What gunicorn asks for: its settings, the WSGI application, and what begins and ends with the worker.

    Made in the arbiter; from `load` on it lives in the worker, on gunicorn's main thread.
    """

    def __init__(self, settings: Settings, listener: socket.socket, url: str, start_device: StartDevice) -> None:
        self._settings = settings
        self._listener = listener
        self._url = url
        self._start_device = start_device
        self.drain_seconds = settings.drain_seconds
        self._is_announced = False
        super().__init__()

    def load_config(self) -> None:
        settings = self._settings
        threads = num_threads(settings)
        for name, value in {
            "bind": self._url.removeprefix("http://"),  # for gunicorn's messages; it is given the open socket
            "workers": 1,
            "worker_class": Worker,
            "threads": threads,
            "worker_connections": threads + IDLE_CONNECTIONS,
            "timeout": 120,  # of the main loop's heartbeat, not of requests
            "graceful_timeout": math.ceil(settings.drain_seconds) + EXIT_SECONDS,
            "keepalive": 75,  # above nginx's 60, so that it is nginx that closes
            "backlog": BACKLOG,
            "max_requests": 0,
            "preload_app": False,
            "reload": False,
            "control_socket_disable": True,
            "forwarded_allow_ips": "127.0.0.1",
            "accesslog": "-",
            "errorlog": "-",
            "logger_class": GunicornLog,
            "worker_tmp_dir": "/dev/shm" if os.path.isdir("/dev/shm") else None,
            "post_worker_init": lambda worker: self.start(),
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Flask:
        limit = self._settings.max_running + self._settings.max_waiting
        self.engine = Engine(max_inflight=limit, metrics=Metrics())
        self._watcher = Watcher()
        return create_app(self.engine, self._settings, self._watcher)

    def start(self) -> None:
        self._device = self._start_device(self._settings, self.engine)

    def run(self) -> None:
        arbiter = OneWorkerArbiter(self)
        arbiter.LISTENERS = [self._listener]
        arbiter.run()

    def announce(self) -> None:
        """Tells once, when the model is ready, where it is served and what to try."""
        if self._is_announced or self.engine.phase is not Phase.READY:
            return
        self._is_announced = True
        variable = OTHER_KEY_VARIABLE if OTHER_KEY_VARIABLE in self._settings.sources.get("api_key", "") else KEY_VARIABLE
        key = f" -H \"Authorization: Bearer ${variable}\"" if self._settings.api_keys else ""
        name = self.engine.model.name
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        log.info("ready: %s on %s; try:", name, self._url)
        log.info("curl %s/v1/chat/completions -H 'Content-Type: application/json'%s -d '%s'", self._url, key, body)

    def begin_drain(self, seconds: float) -> None:
        self.engine.begin_drain(time.monotonic() + seconds)

    def close(self) -> None:
        """Ends what `load` and `start` began; no HTTP thread waits for tokens any more."""
        self.begin_drain(0)
        self.engine.stop()
        self._watcher.stop()
        self._device.join(JOIN_SECONDS if self._is_announced else 0)  # one that still loads has nobody to serve


class Worker(ThreadWorker):  # type: ignore[misc]
    """gunicorn's threaded worker with our way to end: drain first, then leave. Runs on the worker's main thread.

    Signal handlers only leave a note for the main loop: a handler that came while another holds the inbox's lock would
    never return.
    """

    def get_thread_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.cfg.threads, thread_name_prefix="levserve-http")

    def init_process(self) -> None:
        """The worker's whole life. What fails here leaves at once: sys.exit would wait for threads that wait for us."""
        try:
            super().init_process()
        except StartupError as error:
            print(f"levserve: error: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        except Exception:
            log.exception("the main loop failed")
            os._exit(FAULT)

    def run(self) -> None:
        super().run()
        self.app.close()
        logging.shutdown()
        os._exit(0)  # sys.exit would wait for the pool, where a thread may be stuck with a client that does not read

    def handle(self, conn: Any) -> Any:
        """On an HTTP thread: answers one request, and closes the connection here if it is not kept.

        Closing waits up to 2 s for the client's own close. gunicorn does that on the main loop, one client after another.
        """
        result = super().handle(conn)
        if result and self.alive:
            return result
        with suppress(OSError):  # closed already
            conn.close(graceful=True)
        return False

    def finish_request(self, conn: Any, future: Future[Any]) -> None:
        if future.cancelled() or future.exception() or not future.result():
            self.nr_conns -= 1
        else:
            super().finish_request(conn, future)

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: Exception) -> None:
        """On an HTTP thread: answers what never became a request of the application; gunicorn's own answer is a page in HTML."""
        told = explain_refusal(exc)
        if told.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("a request failed outside the application", exc_info=exc)
        else:
            log.info("refused with %d: %s", told.status, type(exc).__name__)  # what was sent may hold secrets
        body = error_body(told)
        head = f"HTTP/1.1 {told.status} {HTTPStatus(told.status).phrase}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nx-request-id: {os.urandom(8).hex()}\r\nConnection: close\r\n\r\n"
        with suppress(OSError):  # gone
            client.sendall(head.encode() + body)

    def notify(self) -> None:
        """Called about once a second by the main loop."""
        super().notify()
        self.app.announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM: running requests have the drain time to finish."""
        self.method_queue.defer(self._leave, self.app.drain_seconds)

    def handle_quit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT and SIGQUIT: running requests are ended at once, each with an error that its client can read."""
        self.method_queue.defer(self._leave, 0.0)

    def handle_abort(self, sig: int, frame: FrameType | None) -> None:
        """SIGABRT: the arbiter saw no heartbeat of the main loop."""
        os._exit(FAULT)

    def _leave(self, drain_seconds: float) -> None:
        self.app.begin_drain(drain_seconds)
        self.alive = False


class OneWorkerArbiter(Arbiter):  # type: ignore[misc]
    """Keeps one worker for life and ends with it: a second one would want the device's memory again."""

    _worker_exit = 0

    def _ignore(self) -> None:
        self.log.warning("signal ignored: restart the service instead")

    handle_hup = handle_ttin = handle_ttou = handle_usr2 = _ignore  # SIGWINCH is ignored as it is: a terminal sends it

    def spawn_workers(self) -> None:
        """Called when there is no worker: at the start, and when the one we had is gone."""
        if self.worker_age == 0:
            super().spawn_workers()
            return
        if self._worker_exit not in (0, 1, 2):  # after these it has said itself what there was to say
            log.error("the worker ended with %s; so does the server", self._worker_exit)
            self._worker_exit = FAULT
        raise HaltServer("the worker has ended", self._worker_exit)

    def reap_workers(self) -> None:
        """Notes how the worker ended; as the first process of a container we also have orphans to collect."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self.WORKERS.pop(pid, None)
            if worker is not None:
                worker.tmp.close()
                self._worker_exit = os.waitstatus_to_exitcode(status)

    def halt(self, reason: str | None = None, exit_status: int = 0) -> None:
        self.stop()
        sys.exit(exit_status)


class GunicornLog(Logger):  # type: ignore[misc]
    """Sends gunicorn's warnings to our log, and makes the one line that each request leaves there."""

    def setup(self, cfg: Any) -> None:
        self.cfg = cfg
        self.error_log.setLevel(logging.WARNING)
        self.error_log.propagate = True

    def access(self, resp: Any, req: Any, environ: dict[str, Any], request_time: Any) -> None:
        request_id = next((value for name, value in resp.headers if name.lower() == "x-request-id"), "-")
        path = ascii(environ["RAW_URI"].partition("?")[0])[1:-1]  # a query may hold secrets, a path control characters
        status = str(resp.status).partition(" ")[0]
        milliseconds = round(request_time.total_seconds() * 1000)
        level = logging.DEBUG if path in QUIET_PATHS else logging.INFO
        log.log(level, "%s %s %s %s %d ms", request_id, environ["REQUEST_METHOD"], path, status, milliseconds)


def explain_refusal(exc: Exception) -> ServeError:
    """What gunicorn's parser could not take, as an error of ours; anything else that comes here is a fault."""
    if not isinstance(exc, ParseException) or isinstance(exc, (InvalidResponseHeader, InvalidResponseHeaderName)):
        return ServeError("The server failed to handle the request.")
    told = BadRequest(f"The request cannot be read: {str(exc)[:MAX_QUOTED]}.")
    told.status = next((status for kind, status in PARSER_STATUS.items() if isinstance(exc, kind)), told.status)
    return told


def _url(listener: socket.socket) -> str:
    """Where a client on this machine finds the listener."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
