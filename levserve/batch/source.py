"""Reads a batch file line by line, from disk or from a store, with only a block and one line in memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from levserve.batch.line import InputLine
from levserve.errors import ConfigError, cause_of
from levserve.weights.store import Store, as_startup_error, is_address

BLOCK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ENVELOPE_BYTES = 1 << 16
"""Bytes that a line may have besides its body."""


class Source:
    """A file that can be read from its beginning any number of times. Raises `StartupError`."""

    def __init__(self, place: str | Path) -> None:
        self._place = place
        self._store = Store(place) if isinstance(place, str) and is_address(place) else None
        self.num_bytes = self._measure()

    def lines(self, max_body_bytes: int) -> Iterator[InputLine]:
        """The lines that are not empty; of a line longer than any allowed body, only the beginning."""
        return split_lines(self._blocks(), max_body_bytes + ENVELOPE_BYTES)

    def _measure(self) -> int:
        if self._store is None:
            with _telling_failures(self._place):
                mode = os.stat(self._place).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder fails with the reason
                    raise ConfigError(f"cannot read {self._place}: it is not a regular file")
                with open(self._place, "rb") as file:
                    return file.seek(0, os.SEEK_END)
        self._file = self._store.describe("")
        if self._file is None:
            raise ConfigError(f"cannot read {self._place}: there is no such file")
        return self._file.num_bytes

    def _blocks(self) -> Iterator[bytes]:
        if self._store is None:
            with _telling_failures(self._place), open(self._place, "rb") as file:
                while block := file.read(BLOCK_BYTES):
                    yield block
            return
        assert self._file is not None
        for index in range(self._file.num_blocks):
            with as_startup_error(str(self._place)):
                block = self._store.read_range(self._file, *self._file.block(index))
            yield block


@contextmanager
def _telling_failures(place: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot read {place}: {cause_of(error)}") from None


def split_lines(blocks: Iterable[bytes], max_bytes: int) -> Iterator[InputLine]:
    """Cuts blocks into lines. Of a line longer than `max_bytes`, only that many bytes are kept."""
    number = 1
    kept = bytearray()
    num_bytes = 0
    for block in _without_mark(blocks):
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            num_bytes += end - start + 1
            kept += block[start : min(end, start + max_bytes + 1 - len(kept))]
            if (line := _make_line(number, kept, num_bytes, max_bytes)) is not None:
                yield line
            kept.clear()
            number, num_bytes, start = number + 1, 0, end + 1
        num_bytes += len(block) - start
        kept += block[start : start + max_bytes + 1 - len(kept)]
    if (line := _make_line(number, kept, num_bytes, max_bytes)) is not None:
        yield line


def _make_line(number: int, kept: bytearray, num_bytes: int, max_bytes: int) -> InputLine | None:
    is_too_long = len(kept) > max_bytes
    data = bytes(kept[:max_bytes]).strip()
    return InputLine(number, data, num_bytes, is_too_long) if data or is_too_long else None


def _without_mark(blocks: Iterable[bytes]) -> Iterator[bytes]:
    for index, block in enumerate(blocks):
        yield block if index else block.removeprefix(BYTE_ORDER_MARK)
