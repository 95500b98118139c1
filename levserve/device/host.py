"""What the host reports of its memory and its CPU, for the machine and for this process. Imports no jax."""

from __future__ import annotations

import functools
import os
import platform
import resource
from pathlib import Path

from levserve.observe.control_group import PROC, ROOT, free_group_memory, group_memory


def free_memory(proc: Path = PROC, root: Path = ROOT) -> int:
    """Bytes this process may still take: the least left by machine, control groups and limits (`ulimit`)."""
    # Linux counts pages of mapped files as available, but weights that are mapped are needed all the time.
    mapped = _read_kilobytes(proc / "self/status", "RssFile:")
    free = _read_kilobytes(proc / "meminfo", "MemAvailable:") - mapped
    in_group, in_space = free_group_memory(mapped, proc, root), free_address_space(proc)
    return min(each for each in (free, in_group, in_space) if each is not None)


def free_address_space(proc: Path = PROC) -> int | None:
    """Bytes that `ulimit -v` or `ulimit -d` leaves this process; None without such a limit."""
    found = []
    for kind, name in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            found.append(limit - _read_kilobytes(proc / "self/status", name))
    return min(found, default=None)


def total_memory() -> int:
    """Bytes of the machine's memory, or of this process's control group if that may take less."""
    total, limit = _read_kilobytes(PROC / "meminfo", "MemTotal:"), group_memory()
    return total if limit is None else min(total, limit)


@functools.cache
def cpu_name() -> str:
    """The CPU's name on x86; on ARM, the architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_features() -> str:
    """The CPU's model and instruction sets: x86 lists them as flags, ARM as Features."""
    kept = ("flags", "Features", "CPU part", "model name")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def process_memory() -> int:
    """Bytes of the host's memory that this process takes now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_memory() -> int:
    """The most bytes of the host's memory that this process has taken so far."""
    # Not from `getrusage`, whose peak includes that of the process that started this one.
    return _read_kilobytes(Path("/proc/self/status"), "VmHWM:")


def _read_kilobytes(path: Path, name: str) -> int:
    """The value of the line with this name, which is in kB, as bytes; 0 if a sandbox leaves the line out."""
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0
