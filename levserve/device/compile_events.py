"""Counts everything that jax compiles in this process, from jax's own events.

Compiles are expected at the start and on background threads (`BACKGROUND_THREADS`). On any other thread, once
the server is ready, a compile makes requests wait: it is counted as `serving` and logged, and it is a defect.
"""

from __future__ import annotations

import logging
import threading

import jax

from levserve.observe.metrics import Metrics
from levserve.observe.threads import COMPILER_THREAD, LOADER_THREAD

log = logging.getLogger(__name__)

BACKGROUND_THREADS = (COMPILER_THREAD, LOADER_THREAD)
COMPILED = "/jax/core/compile/backend_compile_duration"  # also for a program that was found on disk
CACHE_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
CACHE_HIT = "/jax/compilation_cache/cache_hits"
CACHE_MISS = "/jax/compilation_cache/cache_misses"

_listening: dict[Metrics, Compiles] = {}


def listen(metrics: Metrics) -> Compiles:
    """The one listener of these metrics, so each compile counts once; every caller must call its `stop`."""
    compiles = _listening.get(metrics) or Compiles(metrics)
    _listening[metrics] = compiles
    compiles.num_users += 1
    return compiles


class Compiles:
    """Listens until the last of its users has called `stop`. jax calls it on the thread that compiles."""

    def __init__(self, metrics: Metrics) -> None:
        self.num_users = 0
        self._metrics = metrics
        self._is_ready = False
        self._here = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def note_ready(self) -> None:
        self._is_ready = True

    def stop(self) -> None:
        self.num_users -= 1
        if self.num_users:
            return
        del _listening[self._metrics]
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    @property
    def num_compiled_here(self) -> int:
        """Programs that jax compiled on this thread, without those it found on disk or had in memory."""
        return getattr(self._here, "num_compiled", 0)

    def note_found(self, name: str, duration_secs: float) -> None:
        """Counts a program that `program_cache` found on disk like those that jax itself finds there."""
        self._metrics.compile_cache_hits.inc()
        self._on_duration(COMPILED, duration_secs, fun_name=name)

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != COMPILED:
            return
        when = self._when()
        self._metrics.compiles.labels(when).inc()
        self._metrics.compile_seconds.labels(when).inc(duration_secs)
        if when == "serving":
            log.warning(
                "a round waited %.1f s for the compile of %s",
                duration_secs,
                kwargs.get("fun_name", "a program"),
            )

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        if event == CACHE_ASKED:
            self._here.num_compiled = self.num_compiled_here + 1
        elif event == CACHE_HIT:
            self._here.num_compiled = self.num_compiled_here - 1
            self._metrics.compile_cache_hits.inc()
        elif event == CACHE_MISS:
            self._metrics.compile_cache_misses.inc()

    def _when(self) -> str:
        if not self._is_ready:
            return "startup"
        return "background" if threading.current_thread().name in BACKGROUND_THREADS else "serving"
