"""Tells whether a custom_id came earlier in a file, in little memory: a table has a 64-bit hash of each."""

from __future__ import annotations

import hashlib
from array import array

FIRST_SIZE = 1 << 12


class SeenIds:
    """Takes 16 to 32 bytes for an id of any length. Belongs to one thread.

    Among files of ten million lines, one in 350,000 has two different ids with the same hash.
    """

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * FIRST_SIZE))
        self._count = 0

    def add(self, custom_id: str) -> bool:
        """Adds an id; returns whether it is new."""
        number = _hash(custom_id)
        place = self._find(number)
        if self._table[place] == number:
            return False
        self._table[place] = number
        self._count += 1
        if 2 * self._count > len(self._table):
            self._grow()
        return True

    def _find(self, number: int) -> int:
        """The place of the number in the table, or the free place where it belongs."""
        table, mask = self._table, len(self._table) - 1
        place = number & mask
        while table[place] not in (0, number):
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        old = self._table
        self._table = array("Q", bytes(16 * len(old)))
        for number in old:
            if number:
                self._table[self._find(number)] = number


def _hash(custom_id: str) -> int:
    """Never 0, which marks a free place. JSON may hold half a surrogate pair, which UTF-8 cannot encode."""
    digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) or 1
