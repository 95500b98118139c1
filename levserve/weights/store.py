"""Folders and files behind gs://, s3:// and http(s):// addresses, through fsspec. Imports no jax."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any

from levserve.errors import ConfigError, StartupError
from levserve.settings.credentials import without_credentials

LIBRARIES = {  # the module that each kind of address needs, and what to install for it
    "gs": ("gcsfs", "levserve[gcs]"),
    "s3": ("s3fs", "levserve[s3]"),
    "http": ("aiohttp", "aiohttp"),
    "https": ("aiohttp", "aiohttp"),
}
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://.+")
BLOCK_BYTES = 16 << 20
NUM_READERS = 8
NUM_ATTEMPTS = 3
RETRY_SECONDS = 0.5
MD5 = re.compile(r"[0-9a-f]{32}")


def is_address(text: str) -> bool:
    return ADDRESS.fullmatch(text) is not None


def check_address(address: str) -> None:
    """Refuses a kind of address that is not supported or whose library is not installed."""
    scheme = address.partition("://")[0]
    shown = without_credentials(address)
    if scheme not in LIBRARIES:
        supported = ", ".join(f"{name}://" for name in LIBRARIES)
        raise ConfigError(f"{shown}: {scheme}:// is not supported; supported are {supported}")
    library, package = LIBRARIES[scheme]
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"{shown}: reading {scheme}:// needs {library}; pip install '{package}'")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a store: its path there, its name in the cache, and what the store says about its content."""

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
        """The position of a block's first byte and of the byte after its last."""
        if not self.has_ranges:
            return 0, self.num_bytes
        start = index * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self.num_bytes)


class Store:
    """The folder or file at one address."""

    def __init__(self, address: str) -> None:
        check_address(address)
        # gcsfs would first ask over gRPC for the type of the bucket, which many accounts and proxies refuse.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        import fsspec  # here, because a start from local files need not pay for it

        self.address = address.rstrip("/")
        self.shown = without_credentials(self.address)
        """The address for messages."""
        self._scheme = address.partition("://")[0]
        self._is_web = self._scheme.startswith("http")
        with as_startup_error(self.address):
            self._fs, self._root = fsspec.url_to_fs(self.address)
            self._fs.invalidate_cache()

    def list_files(self) -> list[str]:
        """The names of all files below the folder; [""] if the address is a file, [] if there is nothing."""
        with as_startup_error(self.address):
            found = self._fs.find(self._root)
        root = self._root.rstrip("/")
        return sorted("" if path == root else path[len(root) + 1 :] for path in found)

    def list_folders(self) -> list[str]:
        """The names of the folders directly below this one."""
        return [name for name, is_folder in self.list_entries().items() if is_folder]

    def list_entries(self) -> dict[str, bool]:
        """The sorted names directly below this one, and whether each is a folder; {} if there are none."""
        with as_startup_error(self.address):
            try:
                entries = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return {}
        found: dict[str, bool] = {}
        for entry in entries:
            path = str(entry["name"]).rstrip("/")
            if path != self._root.rstrip("/"):
                found[PurePosixPath(path).name] = entry["type"] == "directory"
        return dict(sorted(found.items()))

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it does not exist."""
        with as_startup_error(f"{self.address}/{name}"):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def describe(self, name: str) -> RemoteFile | None:
        """What the store knows about a file; None if it does not exist."""
        path = self._path(name)
        with as_startup_error(f"{self.address}/{name}".rstrip("/")):
            try:
                info = self._fs.info(path)
            except FileNotFoundError as error:
                if self._is_web and getattr(error.__cause__, "status", None) != HTTPStatus.NOT_FOUND:
                    # fsspec raises FileNotFoundError for every failed request.
                    raise OSError(str(error.__cause__)) from error
                return None
        if info.get("type") == "directory":
            return None
        if info.get("size") is None:
            raise StartupError(f"cannot fetch {without_credentials(path)}: the server does not give its size")
        num_bytes = int(info["size"])
        has_ranges = True
        if self._is_web:
            with as_startup_error(path):
                has_ranges = num_bytes > BLOCK_BYTES and _serves_ranges(path)
        etag = str(info.get("etag") or info.get("ETag") or "").strip('"')
        return RemoteFile(
            path,
            name or PurePosixPath(path).name,
            num_bytes,
            tag=str(info.get("generation") or etag or info.get("Last-Modified") or ""),
            md5=_md5(info, etag if self._scheme == "s3" else ""),
            crc32c=info.get("crc32c"),
            has_ranges=has_ranges,
        )

    def describe_all(self, names: Sequence[str]) -> list[RemoteFile]:
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="levserve-fetch") as pool:
            return [file for file in pool.map(self.describe, names) if file is not None]

    def read_range(self, file: RemoteFile, start: int, stop: int) -> bytes:
        for attempt in range(NUM_ATTEMPTS):
            try:
                data = bytes(self._fs.cat_file(file.path, start=start, end=stop)) if stop > start else b""
                break
            except Exception:  # the library of each store has its own errors
                if attempt == NUM_ATTEMPTS - 1:
                    raise
                time.sleep(RETRY_SECONDS * 2**attempt)
        if len(data) != stop - start:
            wanted = f"got {len(data)} bytes instead of {stop - start} from position {start}"
            raise OSError(f"{wanted}; the file changed or the server ignores ranges")
        return data

    def read_whole(self, file: RemoteFile, path: Path) -> None:
        self._fs.get_file(file.path, str(path))

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file to the folder, in place of one of the same name."""
        with self._writing(name):
            self._fs.pipe_file(self._path(name), data)

    def write_file(self, name: str, path: Path) -> None:
        """Writes a file of any size to the folder, in place of one of the same name."""
        with self._writing(name):
            self._fs.put_file(str(path), self._path(name))

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with self._writing(name), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def check_writable(self) -> None:
        """Raises `ConfigError` for a kind of address that cannot be written to."""
        if self._is_web:
            raise ConfigError(f"cannot write {self.shown}: only gs:// and s3:// can be written to")

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        self.check_writable()
        with as_startup_error(f"{self.address}/{name}".rstrip("/"), verb="write"):
            yield

    def is_encrypted(self, file: RemoteFile) -> bool:
        """Whether S3 encrypts the object with KMS or a customer's key, so that its ETag is not an MD5."""
        if self._scheme != "s3":
            return False
        bucket, _, key = file.path.partition("/")
        head = self._fs.call_s3("head_object", Bucket=bucket, Key=key)
        encryption = str(head.get("ServerSideEncryption", ""))
        return encryption.startswith("aws:kms") or "SSECustomerAlgorithm" in head

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root


@contextmanager
def as_startup_error(address: str, *, hint: str = "", verb: str = "fetch") -> Iterator[None]:
    """Turns any error of a store's library into one line that names the address."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        # Some libraries put the address into their reasons.
        reason = without_credentials(" ".join(str(error).split()))[:300] or type(error).__name__
        raise StartupError(f"cannot {verb} {without_credentials(address)}: {reason}{hint}") from error


def _md5(info: Mapping[str, Any], etag: str) -> str | None:
    """The MD5 from Google's or HTTP's base64, or S3's ETag, which is one unless the upload was in parts."""
    encoded = info.get("md5Hash") or info.get("Content-MD5")
    if encoded:
        return base64.b64decode(encoded).hex()
    return etag if MD5.fullmatch(etag) else None


def _serves_ranges(url: str) -> bool:
    """Whether a web server honours Range; if not, fsspec would mistake the whole file for the range.

    A server that answers only fsspec's own client counts as one that does not: the file then comes in one
    piece.
    """
    try:
        request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return bool(response.status == HTTPStatus.PARTIAL_CONTENT)
    except (OSError, HTTPException, ValueError):
        return False
