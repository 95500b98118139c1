"""Which lines of a file are done: one bit for each, and a few checksums to tell the file from others."""

from __future__ import annotations

from levserve.batch.line import RESULT_ID, InputLine
from levserve.errors import ConfigError

NUM_CHECKED = 100_000
"""Checksums to keep; a file that another one was put in place of differs in its first lines already."""


class DoneLines:
    """A file of ten million lines takes 1.25 MB and the checksums. Belongs to one thread."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._checksums: dict[int, int] = {}
        self.num_done = 0

    def add(self, result_id: str) -> bool:
        """Takes the id of a result; whether it is one, of a line that was not done yet."""
        found = RESULT_ID.fullmatch(result_id)
        if found is None:
            return False
        number = int(found[1], 16)
        place, bit = number >> 3, 1 << (number & 7)
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits)))
        if self._bits[place] & bit:
            return False
        self._bits[place] |= bit
        self.num_done += 1
        if len(self._checksums) < NUM_CHECKED:
            self._checksums[number] = int(found[2], 16)
        return True

    def has(self, line: InputLine) -> bool:
        """Raises `ConfigError` if the result is that of another line."""
        place = line.number >> 3
        if place >= len(self._bits) or not self._bits[place] & (1 << (line.number & 7)):
            return False
        checksum = self._checksums.get(line.number)
        if checksum is not None and checksum != line.checksum:
            raise ConfigError(
                f"line {line.number} of the input is not the one that was answered before: "
                "the file has changed, or the results are of another one"
            )
        return True
