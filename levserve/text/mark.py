"""Finds a mark in an answer's tokens: text that ends one of its phases, such as `</think>` or `<tool_call>`.

The mark may begin and end anywhere within tokens, or be a single token. Everything is counted in bytes, as
tokens spell them. A mark is made while its model is loaded, because that reads the whole vocabulary; the
device thread uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from levserve.text.stops import find_fallbacks
from levserve.text.tokenizer import Tokenizer


class Reached(NamedTuple):
    """How far a mark has been read."""

    num_matched: int
    """How many bytes at the end of the text are the beginning of the mark; 0 after the mark."""
    rest: bytes | None
    """What followed the mark, once it is complete."""


class Mark:
    """Knuth-Morris-Pratt over bytes. The caller keeps `num_matched`, so that sequences can share the mark."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        if not text:
            raise ValueError("a mark has at least one character")
        self.text = text
        self.spelt = text.encode()
        self._first = self.spelt[:1]
        self._fallbacks = find_fallbacks(self.spelt)
        self._inside: dict[int, bytes] = {}
        self._beyond: dict[int, bytes] = {}
        for token in range(tokenizer.vocab_size):
            spelt = tokenizer.token_bytes(token)
            if spelt and spelt in self.spelt:
                self._inside[token] = spelt
            if spelt.find(self.spelt[-1:], 0, -1) >= 0:
                self._beyond[token] = spelt
        self._overshoots: dict[int, Mapping[int, bytes]] = {}
        self._continuations: dict[int, frozenset[int]] = {}

    def read(self, num_matched: int, spelt: bytes) -> Reached:
        """Reads more bytes, up to the end of the mark if that comes."""
        if not num_matched and self._first not in spelt:
            return Reached(0, None)
        length = num_matched
        for index, byte in enumerate(spelt):
            while length and self.spelt[length] != byte:
                length = self._fallbacks[length - 1]
            if self.spelt[length] == byte:
                length += 1
            if length == len(self.spelt):
                return Reached(0, spelt[index + 1 :])
        return Reached(length, None)

    def overshoots(self, num_matched: int) -> Mapping[int, bytes]:
        """The tokens that would complete the mark and go beyond it, each with the bytes after the mark."""
        found = self._overshoots.get(num_matched)
        if found is None:
            reached = {token: self.read(num_matched, spelt).rest for token, spelt in self._beyond.items()}
            found = {token: rest for token, rest in reached.items() if rest}
            self._overshoots[num_matched] = found  # another thread would compute the same
        return found

    def continuations(self, num_matched: int) -> frozenset[int]:
        """The tokens that continue the mark from here, perhaps beyond its end."""
        found = self._continuations.get(num_matched)
        if found is None:
            left = self.spelt[num_matched:]
            within = [token for token, spelt in self._inside.items() if left.startswith(spelt)]
            beyond = [token for token, spelt in self._beyond.items() if spelt.startswith(left)]
            self._continuations[num_matched] = found = frozenset(within + beyond)
        return found
