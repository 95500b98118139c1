"""Opens a model: starts a device thread like the server's, whose end does not end the process."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from levserve.api.model import Model
from levserve.device.rows import resolve_rows
from levserve.device.threads import set_threads
from levserve.engine.engine import Engine
from levserve.errors import ConfigError, StartupError
from levserve.models.load import load
from levserve.models.registry import Registry
from levserve.models.startup import serve
from levserve.observe.metrics import Metrics
from levserve.settings.program import make_settings
from levserve.settings.settings import Settings
from levserve.weights.source import check_source

log = logging.getLogger(__name__)

_first_process = 0
"""The process that opened a model first: this one, or one that it was forked from."""


def open_model(name: str, values: Mapping[str, object], report: Callable[[str], None] | None = None) -> Model:
    """See `levserve.open`."""
    settings = make_settings({"model": name, **values} if name else values)
    return open_with(settings, report)


def open_with(settings: Settings, report: Callable[[str], None] | None = None) -> Model:
    """Loads the one model of the settings. Raises `StartupError`."""
    opened = open_device(settings, report)
    model = Model(opened.registry, opened.settings, opened.close)
    atexit.register(model.close)  # for a program that ends without closing it
    opened.on_closed = lambda: atexit.unregister(model.close)
    return model


def open_device(settings: Settings, report: Callable[[str], None] | None = None) -> OpenedDevice:
    """Loads the one model of the settings, for a caller that brings its own work. Raises `StartupError`."""
    if settings.has_several:
        raise ConfigError("the settings name several models, but only one can be opened at a time")
    if settings.num_hosts > 1:
        raise ConfigError("--num-hosts is for servers: a model that is opened is on one host")
    _require_unforked()
    check_source(settings)
    settings = resolve_rows(settings)
    set_threads(settings.threads)
    _remember_process()
    opened = OpenedDevice(settings, report or _log_progress)
    try:
        opened.wait_ready()
    except BaseException:
        opened.abandon()
        raise
    return opened


class OpenedDevice:
    """Owns the device thread of one model, and with it everything in the device's memory."""

    def __init__(self, settings: Settings, report: Callable[[str], None]) -> None:
        # No stall limit: there is no health check that would report a stalled device.
        self._engine = Engine(
            max_inflight=settings.max_running + settings.max_waiting,
            max_tokens=settings.max_inflight_tokens,
            stall_seconds=0.0,
            metrics=Metrics(),
        )
        self.registry = Registry(self._engine)
        self.on_closed: Callable[[], object] = lambda: None
        self.settings = settings
        self._report = report
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="levserve-device", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        while self._thread.is_alive() and not self._engine.wait_ready(1.0):
            pass
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Ends the thread without waiting for it: it may be in the middle of a compile."""
        self._engine.stop()

    def close(self) -> None:
        from levserve.device.tasks import Detach  # imports jax

        if self._thread.is_alive():
            self._engine.send(Detach(self.registry.default_name, Future()))  # waits for the in-flight round
            self._engine.stop()
            self._thread.join()
        self.registry.close()
        self.registry.join()
        self.on_closed()
        gc.collect()  # frees the compiled programs, which are in reference cycles

    def _run(self) -> None:
        try:
            loaded = load(self.settings, self._engine.metrics, report=self._report)
        except BaseException as error:
            self._failure = error
            self._engine.fail()
            return
        try:
            serve(self.registry, loaded)
        except BaseException as error:
            self._failure = error
            log.critical("the device thread failed", exc_info=True)
            self._engine.fail()
        finally:
            loaded.runner.free()
            self._close_files()

    def _close_files(self) -> None:
        """Closes the model's files, which the cache may then delete."""
        with self.registry.borrow(loads=False) as handle:
            if handle.resident.reloader is not None:
                handle.resident.reloader.close()


def _require_unforked() -> None:
    """Refuses to open a model where jax would hang: its threads are in the process that was forked."""
    if _first_process not in (0, os.getpid()):
        raise StartupError(
            "this process was forked from one that had opened a model, whose threads are not here: "
            "start processes with multiprocessing's 'spawn', or before a model is opened"
        )


def _remember_process() -> None:
    global _first_process
    _first_process = os.getpid()


def _log_progress(line: str) -> None:
    log.info("%s", line)
