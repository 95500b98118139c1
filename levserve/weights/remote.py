"""Fetches model files from gs://, s3:// and http(s):// addresses into the cache, through fsspec.

Files come in blocks, several at a time. A block that arrived is written to `NAME.part` and noted in `NAME.part.blocks`, so a
start after an interruption goes on where the last one was; when size and checksum are right the file gets its name. What is
fetched lies in a folder named after the address and the state of its files there: a folder is filled once and never changes,
and a model that changed in its store gets a folder of its own. No jax here.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
import shutil
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from levserve.errors import ConfigError, StartupError
from levserve.weights.cache_folder import Lease, lease_folder, make_room
from levserve.weights.progress import Progress

LIBRARIES = {"gs": ("gcsfs", "levserve[gcs]"), "s3": ("s3fs", "levserve[s3]")} | dict.fromkeys(
    ("http", "https"), ("aiohttp", "aiohttp")
)
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://.+")
BLOCK_BYTES = 16 << 20
NUM_READERS = 8
NUM_ATTEMPTS = 3
RETRY_SECONDS = 0.5
MD5 = re.compile(r"[0-9a-f]{32}")


def is_address(text: str) -> bool:
    return ADDRESS.fullmatch(text) is not None


def check_address(address: str) -> None:
    """Refuses an address of a kind we cannot read, or whose library is not installed."""
    scheme = address.partition("://")[0]
    if scheme not in LIBRARIES:
        raise ConfigError(
            f"{address}: {scheme}:// is not supported; supported are {', '.join(f'{name}://' for name in LIBRARIES)}"
        )
    library, package = LIBRARIES[scheme]
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"{address}: reading {scheme}:// needs {library}; pip install '{package}'")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a store: its path there, the name it will have here, and what the store says of its content."""

    path: str
    name: str
    num_bytes: int
    tag: str = ""
    md5: str | None = None
    crc32c: str | None = None
    has_ranges: bool = True

    @property
    def num_blocks(self) -> int:
        return max(1, -(-self.num_bytes // BLOCK_BYTES)) if self.has_ranges else 1

    def block(self, index: int) -> tuple[int, int]:
        """First byte of a block and the one after its last."""
        start = index * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self.num_bytes) if self.has_ranges else self.num_bytes


class Store:
    """One folder or file of a store, by its address."""

    def __init__(self, address: str) -> None:
        check_address(address)
        # gcsfs would first ask over gRPC what kind of bucket it is, which many accounts and every proxy refuse, after a minute.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        import fsspec  # late: what is on disk needs no store

        self.address = address.rstrip("/")
        self._scheme = address.partition("://")[0]
        self._is_web = self._scheme.startswith("http")
        with told(self.address):
            self._fs, self._root = fsspec.url_to_fs(self.address)
            self._fs.invalidate_cache()

    def list_files(self) -> list[str]:
        """The names of all files below the folder, or "" when the address is a file itself; nothing if there is nothing."""
        with told(self.address):
            found = self._fs.find(self._root)
        root = self._root.rstrip("/")
        return sorted("" if path == root else path[len(root) + 1 :] for path in found)

    def list_folders(self) -> list[str]:
        """The names of the folders right below this one."""
        with told(self.address):
            entries = self._fs.ls(self._root, detail=True)
        folders = [str(entry["name"]).rstrip("/") for entry in entries if entry["type"] == "directory"]
        return sorted(PurePosixPath(path).name for path in folders if path != self._root.rstrip("/"))

    def read(self, name: str) -> bytes | None:
        """A small file's content; None if it is not there."""
        with told(f"{self.address}/{name}"):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def describe(self, name: str, *, as_name: str = "") -> RemoteFile | None:
        """What the store knows of a file; None if it is not there."""
        path = self._path(name)
        with told(f"{self.address}/{name}".rstrip("/")):
            try:
                info = self._fs.info(path)
            except FileNotFoundError as error:
                if self._is_web and getattr(error.__cause__, "status", None) != HTTPStatus.NOT_FOUND:
                    raise OSError(str(error.__cause__)) from error  # fsspec says so too when nobody answers
                return None
        if info.get("type") == "directory":
            return None
        if info.get("size") is None:
            raise StartupError(f"cannot fetch {path}: the server does not tell its size")
        here = as_name or name or PurePosixPath(path).name
        etag = str(info.get("etag") or info.get("ETag") or "").strip('"')
        return RemoteFile(
            path,
            here,
            int(info["size"]),
            tag=str(info.get("generation") or etag or info.get("Last-Modified") or ""),
            md5=_md5(info, etag if self._scheme == "s3" else ""),
            crc32c=info.get("crc32c"),
            has_ranges=not self._is_web or (int(info["size"]) > BLOCK_BYTES and _serves_ranges(path)),
        )

    def describe_all(self, names: Sequence[str]) -> list[RemoteFile]:
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="levserve-fetch") as pool:
            return [file for file in pool.map(self.describe, names) if file is not None]

    def read_range(self, file: RemoteFile, start: int, stop: int) -> bytes:
        for attempt in range(NUM_ATTEMPTS):
            try:
                data = bytes(self._fs.cat_file(file.path, start=start, end=stop)) if stop > start else b""
                break
            except Exception:  # each store's library has its own errors
                if attempt == NUM_ATTEMPTS - 1:
                    raise
                time.sleep(RETRY_SECONDS * 2**attempt)
        if len(data) != stop - start:
            raise OSError(
                f"got {len(data)} bytes for the {stop - start} from {start} on; the file changed or the server ignores ranges"
            )
        return data

    def read_whole(self, file: RemoteFile, path: Path) -> None:
        self._fs.get_file(file.path, str(path))

    def is_encrypted(self, file: RemoteFile) -> bool:
        """Whether S3 encrypts the object with a key of its own, in which case the ETag is no MD5."""
        if self._scheme != "s3":
            return False
        bucket, _, key = file.path.partition("/")
        head = self._fs.call_s3("head_object", Bucket=bucket, Key=key)
        return (
            str(head.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in head
        )

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root


def fetch_files(
    store: Store,
    files: Sequence[RemoteFile],
    cache_path: Path,
    *,
    limit_bytes: int,
    report: Callable[[str], None],
) -> Lease:
    """A folder with the files, whole and checked; it is kept from being cleared away for as long as the lease is held."""
    state = "\n".join(
        sorted(f"{file.name} {file.num_bytes} {file.tag} {file.md5} {file.crc32c}" for file in files)
    )
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", store.address.partition("://")[2])[-60:].strip("-.")
    digest = hashlib.sha256("\n".join((store.address, state)).encode()).hexdigest()
    folder = cache_path / "stores" / f"{label}-{digest[:16]}"

    def fill() -> None:
        missing = [file for file in files if not _is_whole(folder, file)]
        num_bytes = sum(file.num_bytes for file in missing)
        make_room(folder, num_bytes - _part_bytes(folder, missing), limit_bytes)
        _check_space(folder, num_bytes - _part_bytes(folder, missing))
        report(f"fetching {store.address} ({len(missing)} files, {num_bytes / 1e6:,.0f} MB)")
        _fetch(store, missing, folder, Progress(f"fetching {store.address}", num_bytes, report))

    try:
        return lease_folder(folder, lambda: all(_is_whole(folder, file) for file in files), fill, report)
    except OSError as error:
        raise StartupError(f"cannot keep {store.address} in {folder}: {error}") from error


def _fetch(store: Store, files: Sequence[RemoteFile], folder: Path, progress: Progress) -> None:
    """Fetches all blocks of all files, largest file first, and names each file when its last block is there."""
    pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="levserve-fetch")
    try:
        tasks: dict[Future[int], RemoteFile] = {}
        left: Counter[str] = Counter()
        for file in sorted(files, key=lambda file: -file.num_bytes):
            wanted = _missing_blocks(folder, file)
            progress.advance(file.num_bytes - sum(stop - start for start, stop in map(file.block, wanted)))
            left[file.name] = len(wanted)
            tasks |= {pool.submit(_fetch_block, store, file, folder, index): file for index in wanted}
            if not wanted:
                tasks[pool.submit(_finish, store, file, folder)] = file
        while tasks:
            done, _ = wait(tasks, return_when=FIRST_COMPLETED)
            for future in done:
                file = tasks.pop(future)
                with told(f"{store.address}/{file.name}", hint="; what has arrived is kept for the next try"):
                    progress.advance(future.result())
                left[file.name] -= 1
                if left[file.name] == 0:
                    tasks[pool.submit(_finish, store, file, folder)] = file
    finally:
        pool.shutdown(cancel_futures=True)


def _fetch_block(store: Store, file: RemoteFile, folder: Path, index: int) -> int:
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
    """Checks a file that is complete and gives it its name; a wrong one is thrown away."""
    part, blocks = _part(folder, file)
    problem = _problem(part, file)
    if problem and not (file.md5 and part.stat().st_size == file.num_bytes and store.is_encrypted(file)):
        part.unlink()
        blocks.unlink()
        raise StartupError(f"fetched {file.path}: {problem}; the copy was thrown away")
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
    import google_crc32c  # comes with gcsfs, whose store is the one that tells it

    found = 0
    with path.open("rb") as content:
        while piece := content.read(1 << 20):
            found = google_crc32c.extend(found, piece)
    return base64.b64encode(found.to_bytes(4, "big")).decode()


def _md5(info: Mapping[str, Any], etag: str) -> str | None:
    """Google's and HTTP's MD5 in base64, or S3's ETag, which is one when the object was not put in parts."""
    encoded = info.get("md5Hash") or info.get("Content-MD5")
    if encoded:
        return base64.b64decode(encoded).hex()
    return etag if MD5.fullmatch(etag) else None


def _serves_ranges(url: str) -> bool:
    """Whether a web server sends the part that is asked for; fsspec would take the whole file for it."""
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"Range": "bytes=0-0"}), timeout=60
    ) as response:
        return bool(response.status == HTTPStatus.PARTIAL_CONTENT)


def _part(folder: Path, file: RemoteFile) -> tuple[Path, Path]:
    path = folder / file.name
    return path.with_name(path.name + ".part"), path.with_name(path.name + ".part.blocks")


def _missing_blocks(folder: Path, file: RemoteFile) -> list[int]:
    part, blocks = _part(folder, file)
    noted = set(blocks.read_text().split()) if part.exists() and blocks.exists() else set()
    return [index for index in range(file.num_blocks) if str(index) not in noted]


def _part_bytes(folder: Path, files: Sequence[RemoteFile]) -> int:
    """How much of the files has arrived already."""
    missing = [(file, index) for file in files for index in _missing_blocks(folder, file)]
    return sum(file.num_bytes for file in files) - sum(
        stop - start for start, stop in (file.block(index) for file, index in missing)
    )


def _is_whole(folder: Path, file: RemoteFile) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.num_bytes


def _check_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StartupError(
            f"{folder}: {num_bytes / 1e9:.1f} GB are to be fetched and {free / 1e9:.1f} GB are free on the disk"
        )


@contextmanager
def told(address: str, *, hint: str = "") -> Iterator[None]:
    """Turns whatever a store's library raises into one line that names the address."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StartupError(f"cannot fetch {address}: {reason}{hint}") from error
