"""The CPUs and the memory that this process's control groups allow it. Imports only Python's own modules.

A process is in a group and in all groups above it, and the tightest limit applies. Inside a container the
root folder is usually the container's own group. Linux has two versions of control groups: in version 1 each
controller (kind of limit) has its own tree.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
ROOT = Path("/sys/fs/cgroup")
THREAD_VARIABLES = ("PJRT_NPROC", "NPROC")
"""XLA takes the size of its thread pool from the first of these variables that is set."""


def num_cpus() -> int:
    """How many CPUs this process should compute on: as a variable sets it, or else as many as it may use."""
    for name in THREAD_VARIABLES:
        if given := os.environ.get(name):
            return int(given)
    available, allowed = len(os.sched_getaffinity(0)), _allowed_cpus()
    return available if allowed is None else min(available, allowed)


def allowed_cpus(proc: Path = PROC, root: Path = ROOT) -> int | None:
    """The number of CPUs whose time the groups allow, rounded up; None without a limit."""
    quotas = [_read_numbers(group, "cpu.max") for group in find_groups("", proc, root)]
    quotas += [
        _read_numbers(group, "cpu.cfs_quota_us", "cpu.cfs_period_us")
        for group in find_groups("cpu", proc, root)
    ]
    found = [quota for quota in quotas if len(quota) == 2 and min(quota) > 0]
    return min((max(1, math.ceil(quota / period)) for quota, period in found), default=None)


_allowed_cpus = functools.cache(allowed_cpus)


def free_group_memory(mapped_bytes: int, proc: Path = PROC, root: Path = ROOT) -> int | None:
    """Bytes that this process may still take, given `mapped_bytes` of mapped files; None without a limit."""
    found = []
    for group, limit, used in _find_memory(proc, root):
        stat = _read_stat(group)
        mapped = stat.get("total_mapped_file", stat.get("file_mapped", 0))
        inactive = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        # File pages that another group read first are not charged to this group until they are read again.
        # Inactive file pages that are not mapped are reclaimed before an allocation is refused.
        found.append(limit - used - max(0, mapped_bytes - mapped) + max(0, inactive - mapped))
    return min(found, default=None)


def group_memory(proc: Path = PROC, root: Path = ROOT) -> int | None:
    """The memory limit of the groups, in bytes; None without a limit."""
    return min((limit for _, limit, _ in _find_memory(proc, root)), default=None)


def find_groups(controller: str, proc: Path = PROC, root: Path = ROOT) -> Iterator[Path]:
    """The folders of this process's groups that are visible here, its own first.

    `controller` names a tree of version 1; "" is the tree of version 2.
    """
    tree = root / controller
    path = Path(_own_path(controller, proc))
    for part in (path, *path.parents):
        if part != Path("/") and (folder := tree / part.relative_to("/")).is_dir():
            yield folder
    yield tree


def _own_path(controller: str, proc: Path) -> str:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return "/"
    for line in lines:
        _, names, path = line.split(":", 2)
        if controller in names.split(",") and path.startswith("/"):
            return path
    return "/"


def _find_memory(proc: Path, root: Path) -> Iterator[tuple[Path, int, int]]:
    """Each group that has a limit, with the limit and how much of it is used."""
    for controller, limit, used in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for group in find_groups(controller, proc, root):
            numbers = _read_numbers(group, limit, used)
            if len(numbers) == 2:
                yield group, numbers[0], numbers[1]


def _read_numbers(group: Path, *names: str) -> list[int]:
    """All numbers in these files; "max" is not a number, and a missing file has none."""
    words: list[str] = []
    for name in names:
        with suppress(OSError):
            words += (group / name).read_text().split()
    return [int(word) for word in words if word.lstrip("-").isdigit()]


def _read_stat(group: Path) -> dict[str, int]:
    with suppress(OSError):
        lines = (group / "memory.stat").read_text().splitlines()
        return {name: int(number) for name, number in map(str.split, lines)}
    return {}
