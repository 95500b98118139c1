"""Where the results of a batch go: a file, or an object in a store.

Objects cannot grow. So while a batch for a store runs, its results are kept in a file in the cache, and every
minute the new ones are uploaded as a part beside the object: a killed batch can continue, also on another
machine. At the end the object is written and the parts are removed. Parts are removed last first, so that
those that are left have no gap.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from levserve.batch.done import DoneLines
from levserve.batch.line import ResultLine
from levserve.batch.results import ResultFile
from levserve.errors import ConfigError, StartupError, cause_of
from levserve.weights.store import Store, is_address

PART_NAME = re.compile(r"(\d{15})-(\d{15})\.jsonl")
"""A part's name has the positions in the results where it begins and ends."""
PART_BYTES = 16 << 20
PART_SECONDS = 60.0
"""New results are uploaded when they reach `PART_BYTES`, or when the last upload is this long ago."""


class Output:
    """Results in a file. Belongs to one thread. Raises `StartupError`.

    What it `overwrites` stays until the first result is written.
    """

    def __init__(self, path: Path, *, overwrites: bool = False) -> None:
        self.done = DoneLines()
        self.results = ResultFile(path, self.done, overwrites=overwrites)

    def write(self, result: ResultLine) -> None:
        with self._telling_failures():
            self.results.write(result)

    def finish(self) -> None:
        """Called when every line has its result."""
        with self._telling_failures():
            self.results.finish()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # a failed write has been told already
            self.results.close()

    @contextmanager
    def _telling_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StartupError(
                f"cannot write {self.results.path}: {cause_of(error)}; "
                "the results so far are kept: run the same command again to continue"
            ) from error


class StoreOutput(Output):
    """Results that go to a store in the end."""

    def __init__(self, address: str, cache_path: Path, *, overwrites: bool = False) -> None:
        self._store = Store(address)
        self._store.check_writable()
        self._parts = Store(f"{address}.parts")
        spool = cache_path / "batch" / f"{hashlib.sha256(address.encode()).hexdigest()[:24]}.jsonl"
        spool.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = [name for name in self._parts.list_files() if PART_NAME.fullmatch(name)]
        if not overwrites:
            self._fetch(spool, names)
        super().__init__(spool, overwrites=overwrites)
        self._old_parts = names if overwrites else []
        self._num_sent = 0 if overwrites else _end_of(names)
        # The first new part follows the first new result: a later run takes parts before an old object.
        self._sent_at = -math.inf if overwrites else time.monotonic()
        self._sending: Future[None] | None = None
        self._sender = ThreadPoolExecutor(1, "levserve-upload")

    def write(self, result: ResultLine) -> None:
        super().write(result)
        self._upload()

    def finish(self) -> None:
        self._sender.shutdown()
        super().finish()
        self._store.write_file("", self.results.path)
        self._remove_parts(Store(self._parts.address).list_files())
        self.results.path.unlink()

    def __exit__(self, *error: object) -> None:
        self._sender.shutdown()
        super().__exit__(*error)

    def _upload(self) -> None:
        """Uploads the new results if it is time for it and the last upload has ended."""
        is_due = self.results.num_bytes - self._num_sent >= PART_BYTES
        is_due |= time.monotonic() - self._sent_at >= PART_SECONDS
        if not is_due or self.results.num_bytes == self._num_sent:
            return
        if self._sending is not None:
            if not self._sending.done():
                return
            self._sending.result()
        start, stop = self._num_sent, self.results.num_bytes
        self._sending = self._sender.submit(self._send, start, stop)
        self._num_sent, self._sent_at = stop, time.monotonic()

    def _send(self, start: int, stop: int) -> None:
        self._remove_parts(self._old_parts)
        self._old_parts = []
        with self.results.path.open("rb") as file:
            file.seek(start)
            self._parts.write(f"{start:015d}-{stop:015d}.jsonl", file.read(stop - start))

    def _fetch(self, spool: Path, names: list[str]) -> None:
        """Rebuilds the file in the cache from the store, unless it exists and is at least as long."""
        whole = None if names else self._store.describe("")  # the results of a complete batch
        num_bytes = _end_of(names) if whole is None else whole.num_bytes
        if spool.exists() and spool.stat().st_size >= num_bytes:
            return
        half = spool.with_suffix(".half")
        if whole is not None:
            self._store.read_whole(whole, half)
        else:
            with half.open("wb") as file:
                for name in names:
                    part = self._parts.read(name) or b""
                    file.write(part if part.endswith(b"\n") else part + b"\n")
        os.replace(half, spool)

    def _remove_parts(self, names: list[str]) -> None:
        for name in sorted(names, reverse=True):
            self._parts.remove(name)


def _end_of(names: list[str]) -> int:
    """The number of bytes of results in these parts, which are in order."""
    found = PART_NAME.fullmatch(names[-1]) if names else None
    return 0 if found is None else int(found[2])


def open_output(place: str, cache_path: Path, *, overwrites: bool = False) -> Output:
    """Continues the results that are there, unless it `overwrites` them. Raises `StartupError`."""
    try:
        if is_address(place):
            return StoreOutput(place, cache_path, overwrites=overwrites)
        return Output(Path(place), overwrites=overwrites)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or place}: {cause_of(error)}") from None
