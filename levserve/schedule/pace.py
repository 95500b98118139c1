"""How fast the device works, as measured, and how long its backlog will take.

Belongs to the device thread, which notes every round and every end here. It has no clock of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MOST_TOKENS = 2**30
WINDOW_SECONDS = 30.0
"""Seconds of work that an average covers: older work counts little."""
GUESS_SECONDS = 0.1
"""Seconds of work that a first guess counts as, so that it is soon outweighed."""
WEIGHT_OF_AN_END = 0.05
WEIGHT_OF_A_ROUND = 0.5
"""Weight of a round in the expected decode time, which follows the number of rows within a few rounds."""
PREFILL_SHARE = 1.5
"""In a round that prefills and decodes, prompts get at most this many times the decode time that is expected
once they are streams too: gaps between tokens stay below three times those of rounds without a prompt."""


class Backlog(NamedTuple):
    """Tokens that accepted requests still need: of prompts, and at most to be generated."""

    prefill: int
    decode: int
    first_end: int = 0
    """Tokens that all of them generate, at most, before the first running sequence ends."""


class Expected(NamedTuple):
    """When accepted work is expected to end."""

    drain_seconds: float
    """Until all of it has ended."""
    first_end_seconds: float
    """Until the first running sequence ends; 0 if none is running."""


class Rate:
    """Seconds per token, smoothed over about the last `WINDOW_SECONDS` spent on such tokens."""

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
    """Smoothed costs of prefill and of decoding, and the share of their token limits that requests use.

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
        """The time of a round that did both is split in proportion to the costs measured so far."""
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
        """Records the decode time of a round."""
        before = seconds if self._decoding_seconds is None else self._decoding_seconds
        self._decoding_seconds = max(before + WEIGHT_OF_A_ROUND * (seconds - before), 0.0)
        self._decoded_rows = num_rows

    @property
    def knows_decoding(self) -> bool:
        return self._decoding_seconds is not None

    def max_prefill(self, token_seconds: float, num_streams: int) -> int:
        """Prompt tokens of this cost that a round may compute beside running streams.

        `num_streams` are expected soon; each adds about the time of a prompt's token to a step.
        """
        seconds = self._patience_seconds
        if self._decoding_seconds is not None:
            decoding = self._decoding_seconds + (num_streams - self._decoded_rows) * token_seconds
            seconds = min(seconds, PREFILL_SHARE * max(decoding, 0.0))
        return int(min(seconds / max(token_seconds, 1e-9), MOST_TOKENS))

    def note_end(self, num_generated: int, max_tokens: int) -> None:
        """Most answers end before their limit, so a backlog counted in limits overstates the work."""
        if max_tokens:
            self._used_share += WEIGHT_OF_AN_END * (num_generated / max_tokens - self._used_share)

    def seconds_for(self, backlog: Backlog) -> float:
        return (
            backlog.prefill * self.prefill.token_seconds
            + backlog.decode * self._used_share * self.decode.token_seconds
        )

    def expect(self, backlog: Backlog) -> Expected:
        first_end = backlog.first_end * self._used_share * self.decode.token_seconds
        return Expected(self.seconds_for(backlog), first_end)
