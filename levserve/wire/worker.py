"""gunicorn's threaded worker, for a server with only one: threads get whole requests, and it ends cleanly.

The main thread's loop waits for clients and reads their requests (`connections.py`). A pool of HTTP threads
answers them, one thread per request; a small second pool answers health and metrics while the first is full.
Stock gthread gives a client a thread before its request is complete, and blocks its main loop while it waits
for clients to hang up.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import selectors
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from types import FrameType
from typing import Any

from gunicorn.http.errors import NoMoreData
from gunicorn.http.parser import RequestParser
from gunicorn.workers.gthread import ThreadWorker

from levserve.errors import FAULT_EXIT_CODE, StartupError, Unavailable
from levserve.observe.logs import report_startup_error
from levserve.wire.connection import Connection, State
from levserve.wire.connections import LINGER_SECONDS, Connections
from levserve.wire.framing import RawReader, RawRequest
from levserve.wire.refusal import check_head, explain_refusal, render

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25  # how often deadlines are checked
OPS_THREADS = 4
# With no more than this unread, the kernel has room for another answer, so an ops thread never waits for a
# client to read.
OPS_UNREAD_BYTES = 2**16
MAX_QUEUED = 64  # may wait for a thread; admission will refuse them all, in less than a tenth of a second
DOWNLOAD = re.compile(rb"/v1/files/[^/]+/content")  # the path of the one answer that may be gigabytes
LAST_WORDS_SECONDS = 2.0  # for the last answers after the end of a drain
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH)
CUT_ERRNOS = (errno.EAGAIN, errno.ETIMEDOUT)  # SO_SNDTIMEO and TCP_USER_TIMEOUT


class Worker(ThreadWorker):  # type: ignore[misc]
    """Runs on the worker's main thread, except `handle` and `handle_error`, which run on HTTP threads.

    Signal handlers only queue a call for the main loop: a handler that waited for a lock held by its own
    thread would never return.
    """

    sockets: list[socket.socket]

    def init_process(self) -> None:
        """The worker's whole life. A failure exits at once: sys.exit would wait for the other threads."""
        try:
            super().init_process()
        except StartupError as error:
            report_startup_error(error)
            os._exit(error.exit_code)
        except Exception:
            log.exception("the main loop failed")
            os._exit(FAULT_EXIT_CODE)

    def init_signals(self) -> None:
        super().init_signals()
        for number in IGNORED_SIGNALS:  # a terminal sends them to the whole group; the arbiter logs them
            signal.signal(number, signal.SIG_IGN)
        signal.signal(
            signal.SIGUSR2, lambda sig, frame: self.method_queue.defer(self.app.registry.begin_reload)
        )

    def get_thread_pool(self) -> ThreadPoolExecutor:
        self._ops_pool = start_pool(OPS_THREADS, "levserve-ops")
        return start_pool(self.cfg.threads, "levserve-http")

    def run(self) -> None:
        settings, metrics = self.app.settings, self.app.engine.metrics
        self._connections = Connections(
            self.poller,
            settings,
            metrics,
            self._dispatch,
            self._answer_quickly,
            max_connections=self.cfg.worker_connections,
        )
        self._awaited: set[Connection] | None = None  # in a drain: those that were running when it began
        self._leave_at = math.inf
        self._next_tick = 0.0
        self.poller.register(
            self.method_queue.fileno(), selectors.EVENT_READ, self.method_queue.run_callbacks
        )
        while not self._is_drained():
            self._turn()
        self._report_drain()
        self._close_listeners()
        self._leave_at = time.monotonic() + LINGER_SECONDS
        while self._has_last_words() and time.monotonic() < self._leave_at:
            self._turn()
        self._connections.close()
        self.app.close()
        logging.shutdown()
        os._exit(0)  # sys.exit would wait for HTTP threads, which may be stuck with clients that do not read

    def accept(self, listener: socket.socket) -> None:
        try:
            self._connections.accept(listener)
        except OSError as error:
            log.warning("cannot accept a connection: %s", error.strerror)
            self._connections.make_room()
            self.set_accept_enabled(False)  # until the next tick

    def handle(self, connection: Connection, request: RawRequest) -> bool:
        """Answers a request; whether its connection may carry another.

        Raises `TimeoutError` if the client does not read its answer.
        """
        parser = RequestParser(self.cfg, (), connection.client)
        parser.unreader = RawReader(request)
        req = None
        try:
            req = next(parser)
            check_head(req)
            req._expected_100_continue = False  # already sent, if it was due, before the body arrived
            if not request.is_whole:
                req.force_close()  # announces the close, or the client would send its next request here
            return self.handle_request(req, connection) and request.is_whole and not req.body.failed
        except StopIteration:  # a WebSocket, or an answer that failed half-way and is logged
            return False
        except NoMoreData as error:
            self.handle_error(req, connection.sock, connection.client, error)
        except OSError as error:
            if error.errno in CUT_ERRNOS:
                raise TimeoutError from None
            log.debug("a client left during its answer: %s", error)
        except Exception as error:
            self.handle_error(req, connection.sock, connection.client, error)
        finally:
            request.close()
        return False

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: Exception) -> None:
        """Answers a request that never reached the application; gunicorn itself would send a page in HTML."""
        refusal = explain_refusal(exc)
        if refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("a request failed outside the application", exc_info=exc)
        else:  # without the exception's text: it quotes the request, which may hold secrets
            log.info("refused with %d: %s", refusal.status, type(exc).__name__)
        with suppress(OSError):  # the client has gone
            client.sendall(render(refusal))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM: running requests get the drain time to finish. A second SIGTERM changes nothing."""
        self.method_queue.defer(self._drain)

    def handle_quit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT and SIGQUIT: running requests end at once, each with an error that its client can read."""
        self.method_queue.defer(self._leave, 0.0)

    def handle_abort(self, sig: int, frame: FrameType | None) -> None:
        """SIGABRT: the arbiter has missed the main loop's heartbeat."""
        os._exit(FAULT_EXIT_CODE)

    def _turn(self) -> None:
        self.wait_for_and_dispatch_events(max(self._next_tick - time.monotonic(), 0))
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK_SECONDS
            self._tick()

    def _tick(self) -> None:
        self.notify()
        self._connections.check_deadlines()
        if self.sockets:
            self.set_accept_enabled(True)
        if not self.is_parent_alive():  # the arbiter's successor will need the port
            self._leave(0.0)
        self.app.on_tick()

    def _dispatch(self, connection: Connection, request: RawRequest) -> None:
        """Gives a whole request to a thread, or refuses it if too many wait for one."""
        is_ops = request.path in self.app.ops_paths
        if len(self._connections.running) >= self.cfg.threads + MAX_QUEUED and not is_ops:
            self.app.engine.metrics.refused.labels("threads_full").inc()
            error = Unavailable("The server is overloaded; please try again.", retry_after_seconds=1.0)
            self._connections.refuse(connection, error)
            return
        if is_ops and connection.num_unread() > OPS_UNREAD_BYTES:
            self._connections.give_up(connection)
            return
        connection.enter(State.RUNNING, self._deadline_of(request))
        self._connections.running.add(connection)
        pool = self._ops_pool if is_ops else self.tpool
        future = pool.submit(self.handle, connection, request)
        future.add_done_callback(lambda future: self.method_queue.defer(self._finish, connection, future))

    def _answer_quickly(self, data: bytes) -> bytes | None:
        """The answer to a request for which a thread would be a waste; None for anything else."""
        if self._awaited is not None:
            return None  # in a drain, answers announce that their connections close
        answer: bytes | None = self.app.answer_quickly(data)
        return answer

    def _deadline_of(self, request: RawRequest) -> float:
        """When the answer must have been sent.

        A WebSocket may stay open: pings check its peer. A download takes as long as the client's network
        needs: the kernel ends it if the client reads nothing.
        """
        settings = self.app.settings
        is_long = request.path == self.app.socket_path or DOWNLOAD.fullmatch(request.path) is not None
        if is_long or not settings.request_timeout:
            return math.inf
        return float(time.monotonic() + settings.request_timeout + settings.send_timeout)

    def _finish(self, connection: Connection, future: Future[bool]) -> None:
        if self._awaited is not None:
            self._awaited.discard(connection)
        match future.exception():
            case None:
                self._connections.give_back(connection, keep=future.result())
            case TimeoutError():
                self._connections.give_up(connection)
            case error:
                log.error("a request failed outside the application", exc_info=error)
                self._connections.give_back(connection, keep=False)

    def _drain(self) -> None:
        if self._awaited is None:
            self._leave(self.app.settings.drain_seconds)

    def _leave(self, drain_seconds: float) -> None:
        """Has new requests refused until the running ones have ended or their time is up."""
        if self._awaited is None:
            self._awaited = set(self._connections.running)
            self.max_keepalived = -1  # makes every answer announce that its connection closes
            self._drain_began = time.monotonic()
            log.info("draining for at most %g s; requests running: %d", drain_seconds, len(self._awaited))
        self._leave_at = min(self._leave_at, time.monotonic() + drain_seconds + LAST_WORDS_SECONDS)
        self.app.on_drain(drain_seconds)

    def _is_drained(self) -> bool:
        return self._awaited is not None and (not self._awaited or time.monotonic() >= self._leave_at)

    def _report_drain(self) -> None:
        seconds = time.monotonic() - self._drain_began
        if self._awaited:
            log.warning("drain ended after %.1f s; requests unfinished: %d", seconds, len(self._awaited))
        else:
            log.info("drained in %.1f s", seconds)

    def _has_last_words(self) -> bool:
        """Whether late requests are still being refused; those that had the whole drain do not count."""
        late = self._connections.running - (self._awaited or set())
        return bool(late) or self._connections.num_lingering > 0

    def _close_listeners(self) -> None:
        """Accepts what the kernel has queued, to refuse it properly; later clients cannot connect."""
        for listener in self.sockets:
            self.accept(listener)
        self.set_accept_enabled(False)
        for listener in self.sockets:
            listener.close()
        self.sockets = []


def start_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool that starts all its threads now: a missing one would be noticed only when the server is full."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    is_full = threading.Event()
    try:
        for _ in range(num_threads):
            pool.submit(is_full.wait)
    except RuntimeError:
        raise StartupError(
            f"the system does not allow {num_threads} threads: lower --max-running or --max-waiting, "
            "or raise the limit on tasks (ulimit -u) or on memory (ulimit -v)"
        ) from None
    finally:
        is_full.set()
    return pool
