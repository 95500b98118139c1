"""Weights in the form that CPU kernels read, kept on disk so that later starts map them and compute nothing.

Quantizing a model takes many times longer than reading it. The first start writes the result to a file and
maps it; later starts map it at once. Mapped weights are in memory once, however many processes serve them, so
unquantized weights are kept as well: in the model's own files they are neither aligned nor joined as the
kernels read them.

Each model has a folder in the cache, named by a digest of everything that the prepared weights depend on: the
model's files, the quantization, the order of the matrices and the levserve sources that make them. So a file
is never updated, only replaced. Nothing here stops a start: weights that cannot be kept are prepared in
memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.jit.code_cache import list_packages, read_sources
from levserve.settings.settings import Settings
from levserve.weights.array_file import DamagedFile, is_whole, map_arrays, write_arrays
from levserve.weights.cache_folder import Lease, discard, lease_folder, make_room
from levserve.weights.fill import num_threads
from levserve.weights.fingerprint import fingerprint, list_states
from levserve.weights.model_files import ModelFiles
from levserve.weights.progress import Report

log = logging.getLogger(__name__)

FILE = "weights"
SMALLEST_BYTES = 64 << 20
"""Smaller models are not kept: they are ready in less than a second."""
FREE_SHARE = 0.1
"""The share of a disk that stays free."""
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files take memory that the kernel cannot reclaim."""
SOURCES = (
    "gguf/*.py",
    "jit/builder.py",
    "jit/host_call.py",
    "jit/program.py",
    "jit/target.py",
    "model/aligned.py",
    "model/balance.py",
    "model/cache.py",
    "model/config.py",
    "model/cpu/host_*.py",
    "model/cpu/rotation.py",
    "model/hadamard.py",
    "model/int4_blocks.py",
    "model/int8_blocks.py",
    "model/int8_packing.py",
    "model/lanes.py",
    "model/matrix_rows.py",
    "model/packed.py",
    "model/parameter_shapes.py",
    "model/quantize.py",
    "model/sharding.py",
    "weights/**/*.py",
)
"""The sources that decide how a checkpoint's weights are prepared."""
PACKAGES = ("gguf-", "ml_dtypes-", "numpy-", "safetensors-", "tensorstore-")

Arrays = Iterator[tuple[str, NDArray[np.generic]]]


@dataclass(frozen=True, slots=True)
class WeightCache:
    """The prepared weights of one model: the folder that they are in, or will be."""

    path: Path
    files: ModelFiles
    key: str
    num_bytes: int
    """Their approximate size."""
    limit_bytes: int
    """The limit for the prepared weights of all models together."""

    def read(self, convert: Callable[[], Arrays], report: Report) -> Arrays:
        """The arrays that `convert` makes, mapped from the file, which is written first if it is missing."""
        try:
            yield from self._read_kept(convert, report).items()
            return
        except (OSError, DamagedFile, _NotKept) as error:
            log.warning("the prepared weights are not kept: %s", error)
        yield from convert()

    def _read_kept(self, convert: Callable[[], Arrays], report: Report) -> dict[str, NDArray[np.generic]]:
        for _ in range(2):
            lease = self._lease(convert, report)
            try:
                arrays = map_arrays(
                    self.path / FILE, num_threads(), on_unmap=None if lease is None else lease.close
                )
            except DamagedFile as error:
                if lease is not None:
                    lease.close()
                log.warning("%s is prepared again: %s", self.path / FILE, error)
                discard(self.path)
                continue
            report(f"weights mapped from {self.path / FILE}")
            return arrays
        raise DamagedFile(f"{self.path / FILE} was damaged again after being rewritten")

    def _lease(self, convert: Callable[[], Arrays], report: Report) -> Lease | None:
        """Leases the folder and writes the file if it is missing. None if a read-only folder has the file."""
        try:
            return lease_folder(
                self.path, lambda: is_whole(self.path / FILE), lambda: self._fill(convert, report), report
            )
        except OSError:
            if is_whole(self.path / FILE):
                return None
            raise

    def _fill(self, convert: Callable[[], Arrays], report: Report) -> None:
        """Writes the file. The caller holds the folder's exclusive lock, so there is only one writer."""
        self._check_room()
        report(f"preparing weights for later starts in {self.path}")
        part = self.path / f"{FILE}.part"
        try:
            num_bytes = write_arrays(part, convert())
            if identify(self.files) != self.key:
                raise _NotKept(f"{self.files.path} changed while it was read")
            part.replace(self.path / FILE)
        finally:
            part.unlink(missing_ok=True)
        log.info("prepared weights take %.2f GB in %s", num_bytes / 1e9, self.path)

    def _check_room(self) -> None:
        """Removes weights of other models to make room; none if the limit or disk is too small anyway."""
        file_system = _file_system(self.path)
        if file_system in IN_MEMORY:
            raise _NotKept(f"{self.path} is on an in-memory file system ({file_system})")
        try:
            make_room(
                self.path,
                self.num_bytes,
                self.limit_bytes,
                option="--weight-cache",
                check=self._check_disk,
            )
        except StartupError as error:
            raise _NotKept(str(error)) from None

    def _check_disk(self, freed: int) -> None:
        """Raises `_NotKept` if the disk is too full even after `freed` bytes are removed."""
        disk = shutil.disk_usage(self.path)
        if disk.free + freed - self.num_bytes < FREE_SHARE * disk.total:
            raise _NotKept(
                f"they take {self.num_bytes / 1e9:.2f} GB, and {(disk.free + freed) / 1e9:.2f} of the "
                f"{disk.total / 1e9:.2f} GB of the disk are free"
            )


class _NotKept(Exception):
    """Says why weights are prepared in memory instead of on disk."""


def find_cache(settings: Settings, files: ModelFiles, made: str, num_bytes: int) -> WeightCache | None:
    """Where weights of about `num_bytes` are kept; None if they are not to be kept.

    `made` describes what they depend on besides the model's files and the code that prepares them.
    """
    if num_bytes < SMALLEST_BYTES or not settings.weight_cache:
        return None
    key = identify(files)
    digest = hashlib.sha256(f"{key}\n{made}\n{list_packages(PACKAGES)}\n".encode() + read_sources(SOURCES))
    label = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in files.path.name)
    path = settings.cache_path / "weights" / f"{label[-60:].lstrip('.')}-{digest.hexdigest()[:16]}"
    return WeightCache(path, files, key, num_bytes, settings.weight_cache)


def identify(files: ModelFiles) -> str:
    """A text that differs if any file of the model does."""
    return f"{fingerprint(files)}\n{list_states(files)}"


def _file_system(path: Path) -> str:
    """The type of the file system that a folder is on; empty if Linux does not say."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return ""
