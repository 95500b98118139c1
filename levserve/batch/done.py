"""Remembers which lines of a file are done: a bit for each, and some checksums to recognize another file."""

from __future__ import annotations

from levserve.batch.line import RESULT_ID, InputLine
from levserve.errors import ConfigError

NUM_CHECKED = 100_000
"""Checksums to keep; if the file was replaced by another, its first lines already differ."""


class DoneLines:
    """Takes 1.25 MB for a file of ten million lines, besides the checksums. Belongs to one thread."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._checksums: dict[int, int] = {}
        self.num_done = 0

    def add(self, result_id: str) -> bool:
        """Marks the line of a result as done; False if it was already, or if the id is not a result's."""
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
        """Whether the line is done; raises `ConfigError` if the result belongs to a different line."""
        place = line.number >> 3
        if place >= len(self._bits) or not self._bits[place] & (1 << (line.number & 7)):
            return False
        checksum = self._checksums.get(line.number)
        if checksum is not None and checksum != line.checksum:
            raise ConfigError(
                f"line {line.number} of the input is not the one that was answered before: "
                "the input has changed, or the results belong to a different input"
            )
        return True
