"""How many CPU threads compute: XLA's pool, and our own kernels, which look at the same variable.

Called before the fork; XLA reads the variable once, when its CPU device is opened.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "PJRT_NPROC"
OTHER_VARIABLE = "NPROC"  # XLA reads it if the first is not set
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""A container's limit: microseconds of CPU time in each period, or "max"."""


def set_threads(threads: int) -> None:
    """Takes the given number; with 0 leaves the choice to XLA, unless a container's limit is lower."""
    if threads:
        os.environ[VARIABLE] = str(threads)
        return
    if os.environ.get(VARIABLE) or os.environ.get(OTHER_VARIABLE):
        return
    available, allowed = len(os.sched_getaffinity(0)), allowed_cpus()
    if allowed is not None and allowed < available:
        # With more threads than that, the kernel stops all of them for the rest of each period.
        os.environ[VARIABLE] = str(allowed)
        log.info("threads     %d: the container may use %d of %d CPUs", allowed, allowed, available)


def allowed_cpus(path: Path = CPU_MAX) -> int | None:
    """The CPUs that the cgroup allows, rounded up; None without a limit."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
