"""Counts what jax compiles, wherever in the process it does: by jax's own events, so that nothing escapes.

A compile is expected at the start and on the background threads of `programs.py`. One on any other thread after the server is
ready has made a request wait: it is counted as `serving`, logged, and a defect.
"""

from __future__ import annotations

import logging
import threading

import jax

from levserve.observe.metrics import Metrics
from levserve.observe.threads import COMPILER_THREAD, LOADER_THREAD

log = logging.getLogger(__name__)

BACKGROUND_THREADS = (COMPILER_THREAD, LOADER_THREAD)
COMPILED = "/jax/core/compile/backend_compile_duration"  # also when it was found on disk
CACHE_HIT = "/jax/compilation_cache/cache_hits"
CACHE_MISS = "/jax/compilation_cache/cache_misses"


_listening: dict[Metrics, Compiles] = {}


def listen(metrics: Metrics) -> Compiles:
    """One listener however many models are loaded: each compile counts once. Everyone who gets it calls `stop`."""
    compiles = _listening.get(metrics) or Compiles(metrics)
    _listening[metrics] = compiles
    compiles.num_users += 1
    return compiles


class Compiles:
    """Listens from its making until the last `stop`. jax calls on the thread that compiles."""

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
    def num_found_here(self) -> int:
        """Programs that jax has found on disk for this thread."""
        return getattr(self._here, "num_found", 0)

    def note_found(self, name: str, duration_secs: float) -> None:
        """A program that came from disk without jax's asking for it counts like those for which it asked."""
        self._on_event(CACHE_HIT)
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
        if event == CACHE_HIT:
            self._here.num_found = self.num_found_here + 1
            self._metrics.compile_cache_hits.inc()
        elif event == CACHE_MISS:
            self._metrics.compile_cache_misses.inc()

    def _when(self) -> str:
        if not self._is_ready:
            return "startup"
        return "background" if threading.current_thread().name in BACKGROUND_THREADS else "serving"
