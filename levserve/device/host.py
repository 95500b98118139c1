"""What the host says of its memory and its CPU: of the machine, and of this process's part of it. No jax."""

from __future__ import annotations

import functools
import os
import platform
from contextlib import suppress
from pathlib import Path


def free_memory(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still take: of the machine, or of its control group if that has less."""
    # Linux counts pages of mapped files as available, but weights that are mapped are needed all the time.
    mapped = _read_kilobytes(proc / "self/status", "RssFile:")
    free = _read_kilobytes(proc / "meminfo", "MemAvailable:") - mapped
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return free
    if limit == "max":
        return free
    # Pages that another group mapped first do not count here until they are read again.
    uncounted = max(0, mapped - _mapped_in(group))
    return min(free, int(limit) - used - uncounted)


def total_memory() -> int:
    """Bytes of the machine's memory, or of this process's control group if that may take less."""
    total = _read_kilobytes(Path("/proc/meminfo"), "MemTotal:")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


@functools.cache
def cpu_name() -> str:
    """The CPU's name, as x86 tells it; on ARM, the architecture."""
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
    """Bytes of the host's memory that this process has taken at most."""
    # Not from `getrusage`, whose peak is also that of the process that started this one.
    return _read_kilobytes(Path("/proc/self/status"), "VmHWM:")


def _read_kilobytes(path: Path, name: str) -> int:
    """Bytes of the line with this name, which is in kB; 0 where a sandbox leaves it out."""
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _mapped_in(group: Path) -> int:
    """Bytes of mapped files that count as a control group's memory; 0 if it does not say."""
    with suppress(OSError):
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith("file_mapped "):
                return int(line.split()[1])
    return 0
