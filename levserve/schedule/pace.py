"""How fast the device gets through its work, as measured, and how long what it has will take.

Belongs to the device thread, which notes every round and every end. No clock of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MOST_TOKENS = 2**30
WINDOW_SECONDS = 30.0
"""Of work: what is older counts little."""
GUESS_SECONDS = 0.1
"""Of work is what a first guess counts for: soon outweighed."""
WEIGHT_OF_AN_END = 0.05
WEIGHT_OF_A_ROUND = 0.5
"""In the expected time of a round's decoding: it follows the number of rows in a few rounds."""
PREFILL_SHARE = 1.5
"""Times what decoding takes once those prompts are streams too, at most, goes to prompts in a round that does both: gaps between
tokens stay below three times those of rounds without a prompt."""


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
    """Smoothed costs of prefill and of decoding, and how much of what they may generate requests use.

    Running streams wait no longer than `patience_seconds` for other requests' prompts in one round.
    """

    def __init__(self, prefill_token_seconds: float, patience_seconds: float = math.inf) -> None:
        self.prefill = Rate(prefill_token_seconds)
        self.decode = Rate(prefill_token_seconds)
        self._used_share = 1.0
        self._patience_seconds = patience_seconds
        self._decoding_seconds: float | None = None
        self._decoded_rows = 0

    def note_round(self, num_prefill: int, num_decode: int, seconds: float) -> None:
        """A round that did both is shared between them as their costs so far would have it."""
        prefill = num_prefill * self.prefill.token_seconds
        expected = prefill + num_decode * self.decode.token_seconds
        if expected <= 0:
            return
        prefill_seconds = seconds * prefill / expected
        if num_prefill:
            self.prefill.note(num_prefill, prefill_seconds)
        if num_decode:
            self.decode.note(num_decode, seconds - prefill_seconds)

    def note_decoding(self, num_rows: int, seconds: float) -> None:
        """What the decoding of a round took."""
        before = seconds if self._decoding_seconds is None else self._decoding_seconds
        self._decoding_seconds = max(before + WEIGHT_OF_A_ROUND * (seconds - before), 0.0)
        self._decoded_rows = num_rows

    @property
    def knows_decoding(self) -> bool:
        return self._decoding_seconds is not None

    def max_prefill(self, token_seconds: float, num_streams: int) -> int:
        """Tokens of prompts, which take so long each, that a round may compute beside running streams.

        There are to be so many streams soon; each changes a step by about what a token of a prompt takes.
        """
        seconds = self._patience_seconds
        if self._decoding_seconds is not None:
            decoding = self._decoding_seconds + (num_streams - self._decoded_rows) * token_seconds
            seconds = min(seconds, PREFILL_SHARE * max(decoding, 0.0))
        return int(min(seconds / max(token_seconds, 1e-9), MOST_TOKENS))

    def note_end(self, num_generated: int, max_tokens: int) -> None:
        """Most answers end before their limit, so a backlog counted in limits is longer than it will take."""
        if max_tokens:
            self._used_share += WEIGHT_OF_AN_END * (num_generated / max_tokens - self._used_share)

    def seconds_for(self, backlog: Backlog) -> float:
        return (
            backlog.prefill * self.prefill.token_seconds
            + backlog.decode * self._used_share * self.decode.token_seconds
        )
