"""How many CPU threads compute: XLA's pool, and our own kernels, which look at the same variable.

Called before the fork; XLA reads the variable once, when its CPU device is opened.
"""

from __future__ import annotations

import logging
import os

from levserve.observe.control_group import THREAD_VARIABLES, allowed_cpus

log = logging.getLogger(__name__)


def set_threads(threads: int) -> None:
    """Takes the given number; with 0 leaves the choice to XLA, unless a container's limit is lower."""
    if threads:
        os.environ[THREAD_VARIABLES[0]] = str(threads)
        return
    if any(map(os.environ.get, THREAD_VARIABLES)):
        return
    available, allowed = len(os.sched_getaffinity(0)), allowed_cpus()
    if allowed is not None and allowed < available:
        # With more threads than that, the kernel stops all of them for the rest of each period.
        os.environ[THREAD_VARIABLES[0]] = str(allowed)
        log.info("threads     %d: the container may use %d of %d CPUs", allowed, allowed, available)
