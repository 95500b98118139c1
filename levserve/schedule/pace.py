"""How fast the device gets through its work, as measured, and how long what it has will take.

Belongs to the device thread, which notes every round and every end. No clock of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

WINDOW_SECONDS = 30.0
"""Of work: what is older counts little."""
GUESS_SECONDS = 0.1
"""Of work is what a first guess counts for: soon outweighed."""
WEIGHT_OF_AN_END = 0.05


class Backlog(NamedTuple):
    """Tokens that accepted requests still have to be computed: of prompts, and at most to be generated."""

    prefill: int
    decode: int


class Rate:
    """Seconds a token, smoothed over about the last `WINDOW_SECONDS` that were spent on such tokens."""

    def __init__(self, token_seconds: float) -> None:
        self._seconds = GUESS_SECONDS
        self._tokens = GUESS_SECONDS / max(token_seconds, 1e-9)

    @property
    def token_seconds(self) -> float:
        return self._seconds / self._tokens

    def note(self, num_tokens: int, seconds: float) -> None:
        kept = math.exp(-seconds / WINDOW_SECONDS)
        self._tokens = self._tokens * kept + num_tokens
        self._seconds = self._seconds * kept + seconds


class Pace:
    """Smoothed costs of prefill and of decoding, and how much of what they may generate requests use."""

    def __init__(self, prefill_token_seconds: float) -> None:
        self.prefill = Rate(prefill_token_seconds)
        self.decode = Rate(prefill_token_seconds)
        self._used_share = 1.0

    def note_round(self, num_prefill: int, num_decode: int, seconds: float, decode_seconds: float | None = None) -> None:
        """A round that did both is shared between them as was seen, or else as their costs so far would have it."""
        if decode_seconds is None:
            decode_seconds = seconds * self._decode_share(num_prefill, num_decode)
        if num_prefill:
            self.prefill.note(num_prefill, seconds - decode_seconds)
        if num_decode:
            self.decode.note(num_decode, decode_seconds)

    def _decode_share(self, num_prefill: int, num_decode: int) -> float:
        decode = num_decode * self.decode.token_seconds
        return decode / max(num_prefill * self.prefill.token_seconds + decode, 1e-12)

    def note_end(self, num_generated: int, max_tokens: int) -> None:
        """Most answers end before their limit, so a backlog counted in limits is longer than it will take."""
        if max_tokens:
            self._used_share += WEIGHT_OF_AN_END * (num_generated / max_tokens - self._used_share)

    def seconds_for(self, backlog: Backlog) -> float:
        return backlog.prefill * self.prefill.token_seconds + backlog.decode * self._used_share * self.decode.token_seconds
