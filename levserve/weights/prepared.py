"""Weights as a CPU's kernels read them, kept on disk, so that later starts map them and compute nothing.

To quantize a model takes many times longer than to read it. The first start writes what it made to a file
and maps it; the next ones map it at once. Mapped weights are in memory once, however many processes serve
them. So those that are not quantized are kept as well: in the model's own files they are neither aligned nor
joined as the kernels read them.

Each model has a folder in the cache, named by everything that decides what its weights are made into: the
files, the quantization, the order of the matrices and the sources of levserve that make them. So a file is
never brought up to date, only replaced. Nothing here stops a start: where weights cannot be kept, they are
made in memory.
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
"""The part of a disk that stays free."""
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems on which a file takes memory that is never given back."""
SOURCES = (
    "gguf/*.py",
    "jit/host_call.py",
    "model/aligned.py",
    "model/balance.py",
    "model/config.py",
    "model/cpu/host_rows.py",
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
"""The sources that decide what is made of a checkpoint."""
PACKAGES = ("gguf-", "ml_dtypes-", "numpy-", "safetensors-", "tensorstore-")

Arrays = Iterator[tuple[str, NDArray[np.generic]]]


@dataclass(frozen=True, slots=True)
class WeightCache:
    """The prepared weights of one model: the folder that they are in, or will be."""

    path: Path
    files: ModelFiles
    key: str
    num_bytes: int
    """What they take, about."""
    limit_bytes: int
    """What all models may take."""

    def read(self, convert: Callable[[], Arrays], report: Report) -> Arrays:
        """The arrays that `convert` makes, from the file if there is one, and else after writing it."""
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
        raise DamagedFile(f"{self.path / FILE} is damaged whenever it is written")

    def _lease(self, convert: Callable[[], Arrays], report: Report) -> Lease | None:
        """Writes the file if it is not there. None if the folder cannot be written but has the file."""
        try:
            return lease_folder(
                self.path, lambda: is_whole(self.path / FILE), lambda: self._fill(convert, report), report
            )
        except OSError:
            if is_whole(self.path / FILE):
                return None
            raise

    def _fill(self, convert: Callable[[], Arrays], report: Report) -> None:
        """Holds the folder's lock, so that there is one writer."""
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
        """Removes weights of other models if that makes enough room, and nothing if it does not."""
        if _file_system(self.path) in IN_MEMORY:
            raise _NotKept(f"{self.path} is in memory")
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
        """Whether the disk has room once so many bytes are removed."""
        disk = shutil.disk_usage(self.path)
        if disk.free + freed - self.num_bytes < FREE_SHARE * disk.total:
            raise _NotKept(
                f"they take {self.num_bytes / 1e9:.2f} GB, and {(disk.free + freed) / 1e9:.2f} of the "
                f"{disk.total / 1e9:.2f} GB of the disk are free"
            )


class _NotKept(Exception):
    """Why weights are made in memory."""


def find_cache(settings: Settings, files: ModelFiles, made: str, num_bytes: int) -> WeightCache | None:
    """Where weights that take so many bytes are kept; `made` is all that they depend on besides the files."""
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
