"""Gives KV pages to sequences and finds prompts that were seen before.

Called by the scheduler only, on the device thread. Knows page numbers and token ids; never sees an array.
Every page is in exactly one of three states: free, held (by one or more sequences), or idle (held by none,
kept for its prefix until its page is wanted). `check` verifies this.

A page is remembered under the chain that leads to it: the serial of the page before it and its own tokens.
Tokens are compared, not hashes of them, so a hit is never wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROOT = 0
"""The serial before a first page."""

Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Match:
    """Pages with the start of a prompt, held for the caller, and the serial of the last one."""

    pages: list[int]
    serial: int


class PagePool:
    """Which sequences hold which page, and what idle pages still hold."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._serial_of: dict[int, int] = {}
        self._next_serial = ROOT + 1

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def match(self, tokens: Sequence[int], limit: int) -> Match:
        """Holds the longest run of remembered pages that starts `tokens`, of at most `limit` tokens."""
        pages: list[int] = []
        serial = ROOT
        size = self.page_size
        for start in range(0, limit // size * size, size):
            page = self._page_of.get((serial, tuple(tokens[start : start + size])))
            if page is None:
                break
            self._hold(page)
            pages.append(page)
            serial = self._serial_of[page]
        return Match(pages, serial)

    def take(self, count: int) -> list[int] | None:
        """Holds `count` pages, dropping the least recently used prefixes if needed; None if too few."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._forget_oldest()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def remember(self, page: int, parent: int, tokens: tuple[int, ...]) -> int:
        """Makes a full page findable; returns its serial, or that of an equal page that came first."""
        key = (parent, tokens)
        known = self._page_of.get(key)
        if known is not None:
            return self._serial_of[known]
        serial = self._next_serial
        self._next_serial += 1
        self._page_of[key] = page
        self._key_of[page] = key
        self._serial_of[page] = serial
        return serial

    def release(self, pages: Sequence[int]) -> None:
        """Lets a sequence's pages go, last first: a prefix then outlives what was built on it."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] > 0:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def discard(self, pages: Sequence[int]) -> list[int]:
        """Releases pages and makes them unfindable; gives those that no sequence holds any more.

        Pages remembered on top of them can no longer be reached, and are reused in their turn.
        """
        for page in pages:
            if (key := self._key_of.pop(page, None)) is not None:
                del self._page_of[key], self._serial_of[page]
        self.release(pages)
        return [page for page in pages if self._holders[page] == 0]

    def forget(self) -> None:
        """Makes every prefix unfindable, as the weights have changed; held pages stay with their holders."""
        self._free += self._idle
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()
        self._serial_of.clear()

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Recomputes the state of all pages from the sequences' lists; AssertionError on a difference."""
        holders = [0] * self.num_pages
        for pages in held:
            for page in pages:
                holders[page] += 1
        assert holders == self._holders, "holders differ"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        for page in range(self.num_pages):
            assert (page in free) + (page in idle) + (holders[page] > 0) == 1, (
                f"page {page} is not in one state: {holders[page]} holders, "
                f"free: {page in free}, idle: {page in idle}"
            )
        assert idle <= self._key_of.keys(), "an idle page remembers nothing"
        assert not free & self._key_of.keys(), "a free page remembers something"
        assert {key: page for page, key in self._key_of.items()} == self._page_of, "keys and pages differ"
        assert self._serial_of.keys() == self._key_of.keys(), "serials and keys differ"

    def _hold(self, page: int) -> None:
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def _forget_oldest(self) -> None:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        del self._serial_of[page]
        self._free.append(page)
