"""Runs the application under gunicorn: one arbiter, one worker process for life, its pool of HTTP threads.

`cli.main` calls `serve` in the process that becomes the arbiter, which does not import jax: the device thread
starts in the worker, after the fork. The server exits when its worker does: with 0 after a drain, with 1 or 2
if the model cannot be served, with 70 for anything else. `wire/` holds the worker and the arbiter.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from flask import Flask
from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger

from levserve.device.malloc import Trimmer
from levserve.engine.engine import Engine
from levserve.errors import StartupError
from levserve.models.registry import Registry
from levserve.observe.health import Phase
from levserve.observe.logs import log_settings
from levserve.observe.metrics import Metrics
from levserve.observe.systemd import Notifier, Supervision, take_supervision
from levserve.observe.tracing import start_tracing
from levserve.observe.vllm_metrics import VllmMetrics
from levserve.settings.credentials import without_credentials
from levserve.settings.settings import KEY_VARIABLE, OTHER_KEY_VARIABLE, Settings
from levserve.text.chat import template_of
from levserve.web.app import BATCHES, create_app
from levserve.web.batches.worker import BatchWorker
from levserve.web.hijack import PATH as SOCKET_PATH
from levserve.web.ops import OPS_PATHS
from levserve.web.quick_scrape import QuickScrape
from levserve.web.watcher import Watcher
from levserve.wire.arbiter import OneWorkerArbiter
from levserve.wire.worker import MAX_QUEUED, OPS_THREADS, Worker

log = logging.getLogger(__name__)

StartDevice = Callable[[Settings, Registry], threading.Thread]

SPARE_THREADS = 16  # for refusals and short requests while every place in the queue is taken
IDLE_CONNECTIONS = 1000
OTHER_FILES = 256  # weights, compiled programs, the device
BACKLOG = 2048
EXIT_SECONDS = 10  # from the end of a drain until the worker is killed
# Garbage is collected after this many new objects. A few running requests reach Python's default of 700.
COLLECT_AFTER = 10_000
JOIN_SECONDS = 3.0  # a device thread that is compiling cannot be interrupted


def serve(settings: Settings, start_device: StartDevice) -> NoReturn:
    """Serves until a signal. Raises `StartupError` if it cannot listen, otherwise `SystemExit`."""
    max_connections = allow_files(num_threads(settings))
    supervision = take_supervision(os.environ)
    listener = supervision.listener or listen(settings.host, settings.port)
    # Until gunicorn sets its own handler: there is nothing to drain yet.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    log_settings({row.name: (row.value, row.source) for row in settings.describe()})
    application = Application(settings, listener, start_device, supervision, max_connections)
    model = "the first of several models" if settings.has_several else settings.model
    if settings.lazy:
        model = "no model until a request asks for one"
    log.info("listening on %s, loading %s", application.url, without_credentials(model))
    application.run()
    raise AssertionError("the arbiter raises SystemExit")


def num_threads(settings: Settings) -> int:
    """HTTP threads: one for each request that may run or wait and for each WebSocket, and some to spare."""
    return settings.max_running + settings.max_waiting + settings.max_sockets + SPARE_THREADS


def allow_files(num_threads: int) -> int:
    """Raises the limit on open files as far as it can; returns how many connections may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = num_threads + MAX_QUEUED + OPS_THREADS + OTHER_FILES
    most = least + IDLE_CONNECTIONS
    if hard != resource.RLIM_INFINITY:
        most = min(hard, most)
    if most < least:
        raise StartupError(
            f"{num_threads} HTTP threads need {least} open files, and the limit is {hard} (ulimit -Hn); "
            "lower --max-running, --max-waiting or --max-sockets"
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most - OTHER_FILES


def listen(host: str, port: int) -> socket.socket:
    """Opens the port or fails at once; gunicorn would try five times over five seconds."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python appends the address
        raise StartupError(f"cannot listen on {host}:{port}: {reason}") from None
    # Connections inherit this option: events are small and must not wait for more data.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def freeze_loaded_objects() -> None:
    """Excludes everything loaded so far from garbage collection: scanning it stops all threads for 0.1 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


class Application(BaseApplication):  # type: ignore[misc]
    """What gunicorn asks for: its settings, the WSGI application, and what starts and stops with the worker.

    Made in the arbiter; from `load` on, everything runs on the worker's main thread.
    """

    ops_paths = OPS_PATHS
    socket_path = SOCKET_PATH.encode()

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        start_device: StartDevice,
        supervision: Supervision,
        max_connections: int,
    ) -> None:
        self.settings = settings
        self._listener = listener
        self.url = _url(listener)
        self._start_device = start_device
        self._supervision = supervision
        self._max_connections = max_connections
        self._is_announced = False
        self._is_frozen = False
        self._trimmer = Trimmer()
        super().__init__()

    def load_config(self) -> None:
        settings = self.settings
        for name, value in {
            "bind": self.url.removeprefix("http://"),  # for gunicorn's messages: it gets an open socket
            "workers": 1,
            "worker_class": Worker,
            "threads": num_threads(settings),
            "worker_connections": self._max_connections,
            "timeout": 120,  # for the main loop's heartbeat, not for requests
            "graceful_timeout": math.ceil(settings.drain_seconds) + EXIT_SECONDS,
            "keepalive": math.ceil(settings.keep_alive),
            "backlog": BACKLOG,
            "max_requests": 0,
            "preload_app": False,
            "reload": False,
            "control_socket_disable": True,
            "forwarded_allow_ips": "127.0.0.1",
            "accesslog": None,  # the application logs its requests
            "errorlog": "-",
            "logger_class": GunicornLog,
            "worker_tmp_dir": "/dev/shm" if os.path.isdir("/dev/shm") else None,
            "post_worker_init": lambda worker: self.on_start(),
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Flask:
        settings = self.settings
        self.engine = Engine(
            max_inflight=settings.max_running + settings.max_waiting,
            max_tokens=settings.max_inflight_tokens,
            stall_seconds=settings.stall_seconds,
            metrics=Metrics(),
        )
        self.registry = Registry(self.engine)
        VllmMetrics(self.engine.metrics, is_exported=settings.vllm_metrics)
        self.answer_quickly = QuickScrape(self.engine.metrics, settings).answer
        self._tracing = start_tracing(settings.tracing)
        self._notifier = Notifier(self._supervision, self.engine)
        self._watcher = Watcher()
        app = create_app(self.registry, settings, self._watcher, self._tracing)
        self._batches: BatchWorker = app.extensions[BATCHES]
        return app

    def on_start(self) -> None:
        """Called by the worker before its main loop; it must not block."""
        self._notifier.start()
        self._device = self._start_device(self.settings, self.registry)

    def on_tick(self) -> None:
        """Called by the main loop four times a second; it must not block."""
        self.engine.end_overdue()
        if not self._is_announced and self.engine.phase is Phase.READY:
            self._is_announced = True
            self._announce()
        is_loaded = self.registry.loaded_names() or self.engine.phase is Phase.FOLLOWING
        if not self._is_frozen and is_loaded:
            self._is_frozen = True
            freeze_loaded_objects()
        if self._is_announced:
            self._trimmer.tick()

    def on_drain(self, seconds: float) -> None:
        """Called by the main loop when a signal ends the server, and again if the drain is cut short."""
        self.engine.begin_drain(time.monotonic() + seconds)

    def run(self) -> None:
        arbiter = OneWorkerArbiter(self)
        arbiter.LISTENERS = [self._listener]
        arbiter.run()

    def close(self) -> None:
        """Stops what `load` and `on_start` started; by now no HTTP thread waits for tokens."""
        self.engine.begin_drain(time.monotonic())
        self._batches.close()
        self.engine.stop()
        self.registry.join()
        self._notifier.stop()
        self._watcher.stop()
        if self._tracing is not None:
            self._tracing.stop()
        if self._is_announced:  # a device thread that is still loading is not waited for
            self._device.join(JOIN_SECONDS)
        self.engine.close()

    def _announce(self) -> None:
        """Logs where the model is served, and what to try."""
        name = self.registry.default_name
        if not self.settings.lazy and template_of(self.registry.default.tokenizer) is not None:
            path, prompt = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
        else:
            path, prompt = "completions", '"prompt": "Hello"'
        body = f'{{"model": "{name}", {prompt}}}'
        source = self.settings.sources.get("api_key", "")
        variable = OTHER_KEY_VARIABLE if OTHER_KEY_VARIABLE in source else KEY_VARIABLE
        key = f' -H "Authorization: Bearer ${variable}"' if self.settings.api_keys else ""
        hint = "open it in a browser, or try:" if self.settings.ui else "try:"
        log.info("ready: %s on %s; %s", name, self.url, hint)
        log.info("curl %s/v1/%s -H 'Content-Type: application/json'%s -d '%s'", self.url, path, key, body)


class GunicornLog(Logger):  # type: ignore[misc]
    """Sends gunicorn's warnings to levserve's log."""

    def setup(self, cfg: Any) -> None:
        self.cfg = cfg
        self.error_log.setLevel(logging.WARNING)
        self.error_log.propagate = True


def _url(listener: socket.socket) -> str:
    """The listener's address for a client on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
