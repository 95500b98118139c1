"""Downloads files from a store into the cache. Imports no jax.

Files come in blocks, several at a time. Each block is written to `NAME.part` and noted in `NAME.part.blocks`,
so an interrupted download continues where it stopped. A file gets its name once its size and checksum are
right. The folder's name depends on the address and on the state of its files there: a folder is filled once
and never changes, and a model that changes in its store gets a new folder.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from levserve.errors import StartupError, cause_of
from levserve.weights.cache_folder import Lease, lease_folder, make_room
from levserve.weights.progress import Progress, Report
from levserve.weights.store import NUM_READERS, RemoteFile, Store, as_startup_error

STORES = "stores"
"""The folder of the cache that holds what came from stores."""
ADDRESS_FILE = ".address"


def fetch_files(
    store: Store, files: Sequence[RemoteFile], cache_path: Path, *, limit_bytes: int, report: Report
) -> Lease:
    """A folder with the files, complete and checked, which is not removed while the lease is held."""
    folder = cache_path / STORES / _folder_name(store, files)

    def fill() -> None:
        missing = [file for file in files if not _is_complete(folder, file)]
        num_bytes = sum(file.num_bytes for file in missing)
        needed_bytes = sum(_num_bytes(file, _missing_blocks(folder, file)) for file in missing)
        make_room(folder, needed_bytes, limit_bytes)
        _check_space(folder, needed_bytes)
        report(f"fetching {store.shown} ({len(missing)} files, {num_bytes / 1e6:,.0f} MB)")
        _fetch(store, missing, folder, Progress(f"fetching {store.shown}", num_bytes, report))
        if store.shown == store.address:  # one with credentials is not kept
            (folder / ADDRESS_FILE).write_text(store.address, "utf-8")

    try:
        return lease_folder(folder, lambda: all(_is_complete(folder, file) for file in files), fill, report)
    except OSError as error:
        raise StartupError(
            f"cannot keep {store.shown} in {folder} (--cache-dir): {cause_of(error)}"
        ) from error


def read_address(folder: Path) -> str:
    """The address that a folder of the cache was filled from; empty if that is not known."""
    try:
        return (folder / ADDRESS_FILE).read_text("utf-8")
    except OSError:
        return ""


def _folder_name(store: Store, files: Sequence[RemoteFile]) -> str:
    state = sorted(f"{file.name} {file.num_bytes} {file.tag} {file.md5} {file.crc32c}" for file in files)
    digest = hashlib.sha256("\n".join((store.address, *state)).encode()).hexdigest()
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", store.shown.partition("://")[2])[-60:].strip("-.")
    return f"{label}-{digest[:16]}"


def _fetch(store: Store, files: Sequence[RemoteFile], folder: Path, progress: Progress) -> None:
    """Downloads the missing blocks of all files, the largest file first."""
    pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="levserve-fetch")
    try:
        tasks: dict[Future[int], RemoteFile] = {}
        num_left: Counter[str] = Counter()
        for file in sorted(files, key=lambda file: -file.num_bytes):
            missing = _missing_blocks(folder, file)
            progress.advance(file.num_bytes - _num_bytes(file, missing))
            num_left[file.name] = len(missing)
            for index in missing:
                tasks[pool.submit(_fetch_block, store, file, folder, index)] = file
            if not missing:
                tasks[pool.submit(_finish, store, file, folder)] = file
        while tasks:
            done, _ = wait(tasks, return_when=FIRST_COMPLETED)
            for future in done:
                file = tasks.pop(future)
                hint = "; what has arrived is kept for the next attempt"
                with as_startup_error(f"{store.address}/{file.name}", hint=hint):
                    progress.advance(future.result())
                num_left[file.name] -= 1
                if num_left[file.name] == 0:
                    tasks[pool.submit(_finish, store, file, folder)] = file
    finally:
        pool.shutdown(cancel_futures=True)


def _fetch_block(store: Store, file: RemoteFile, folder: Path, index: int) -> int:
    """Fetches one block and returns its number of bytes."""
    part, blocks = _part(folder, file)
    part.parent.mkdir(parents=True, exist_ok=True)
    start, stop = file.block(index)
    if file.has_ranges:
        data = store.read_range(file, start, stop)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, data, start)
        finally:
            os.close(descriptor)
    else:
        store.read_whole(file, part)
    with blocks.open("a") as notes:
        notes.write(f"{index}\n")
    return stop - start


def _finish(store: Store, file: RemoteFile, folder: Path) -> int:
    """Checks a complete file and gives it its name, or deletes it if it is wrong. Returns 0 bytes."""
    part, blocks = _part(folder, file)
    problem = _problem(part, file)
    if problem and not (file.md5 and part.stat().st_size == file.num_bytes and store.is_encrypted(file)):
        part.unlink()
        blocks.unlink()
        raise StartupError(f"fetched {file.path}: {problem}; the copy was deleted")
    with part.open("rb") as content:
        os.fsync(content.fileno())  # later starts trust name and size
    os.replace(part, folder / file.name)
    blocks.unlink()
    return 0


def _problem(part: Path, file: RemoteFile) -> str | None:
    found_bytes = part.stat().st_size
    if found_bytes != file.num_bytes:
        return f"it has {found_bytes} bytes, expected {file.num_bytes}"
    if file.md5:
        with part.open("rb") as content:
            found = hashlib.file_digest(content, "md5").hexdigest()
        return None if found == file.md5 else f"its md5 is {found}, expected {file.md5}"
    if file.crc32c:
        found = _crc32c(part)
        return None if found == file.crc32c else f"its crc32c is {found}, expected {file.crc32c}"
    return None


def _crc32c(path: Path) -> str:
    import google_crc32c  # comes with gcsfs, an extra; only Google's store gives this checksum

    found = 0
    with path.open("rb") as content:
        while chunk := content.read(1 << 20):
            found = google_crc32c.extend(found, chunk)
    return base64.b64encode(found.to_bytes(4, "big")).decode()


def _part(folder: Path, file: RemoteFile) -> tuple[Path, Path]:
    path = folder / file.name
    return path.with_name(path.name + ".part"), path.with_name(path.name + ".part.blocks")


def _missing_blocks(folder: Path, file: RemoteFile) -> list[int]:
    part, blocks = _part(folder, file)
    noted = set(blocks.read_text().split()) if part.exists() and blocks.exists() else set()
    return [index for index in range(file.num_blocks) if str(index) not in noted]


def _num_bytes(file: RemoteFile, blocks: Iterable[int]) -> int:
    return sum(stop - start for start, stop in map(file.block, blocks))


def _is_complete(folder: Path, file: RemoteFile) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.num_bytes


def _check_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        sizes = f"the download needs {num_bytes / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB free"
        raise StartupError(f"{folder}: {sizes}")
