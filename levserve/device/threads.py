"""Sets how many CPU threads compute, in XLA's pool and in our own kernels, which read the same variable.

Called before the fork; XLA reads the variable once, when its CPU device is opened.
"""

from __future__ import annotations

import logging
import os

from levserve.observe.control_group import THREAD_VARIABLES, allowed_cpus

log = logging.getLogger(__name__)


def set_threads(threads: int) -> None:
    """Sets this many threads; 0 leaves the choice to XLA, unless a container's CPU limit is lower."""
    if threads:
        os.environ[THREAD_VARIABLES[0]] = str(threads)
        return
    if any(map(os.environ.get, THREAD_VARIABLES)):
        return
    available, allowed = len(os.sched_getaffinity(0)), allowed_cpus()
    if allowed is not None and allowed < available:
        # More threads use up the quota early, and the kernel then stops all of them for the rest of a period.
        os.environ[THREAD_VARIABLES[0]] = str(allowed)
        log.info("threads     %d: the container may use %d of %d CPUs", allowed, allowed, available)
