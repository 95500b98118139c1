"""Counts what a batch has done, and describes its progress and its errors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from levserve.batch.runner import LineResult

MAX_KINDS = 10
"""The number of kinds of errors that a summary names."""


class Tally:
    """Belongs to one thread."""

    def __init__(self, num_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_bytes = num_bytes
        self._clock = clock
        self._started = clock()
        self._bytes_before = 0
        self._bytes_run = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self.errors: Counter[tuple[int, str]] = Counter()
        self.num_run = 0
        self.num_before = 0
        self.num_failed_before = 0

    @property
    def num_failed(self) -> int:
        return self.errors.total()

    def start(self) -> None:
        """Called when the first request is about to run, so that the rates do not include loading a model."""
        self._started = self._clock()

    def skip(self, num_bytes: int) -> None:
        """Counts a line that an earlier run has done."""
        self.num_before += 1
        self._bytes_before += num_bytes

    def add(self, result: LineResult) -> None:
        self.num_run += 1
        self._bytes_run += result.line.num_bytes
        self._prompt_tokens += result.prompt_tokens
        self._completion_tokens += result.completion_tokens
        if result.error_code is not None:
            self.errors[result.status, result.error_code] += 1

    def describe_progress(self) -> str:
        seconds = max(self._clock() - self._started, 1e-9)
        share = (self._bytes_before + self._bytes_run) / max(self._num_bytes, 1)
        words = [f"{share:.0%}", f"{self.num_before + self.num_run:,} requests"]
        if self.num_failed:
            words.append(f"{self.num_failed:,} failed")
        words.append(f"{self._completion_tokens / seconds:,.0f} tok/s generated")
        words.append(f"{self._prompt_tokens / seconds:,.0f} tok/s read")
        bytes_left = self._num_bytes - self._bytes_before - self._bytes_run
        if self._bytes_run and bytes_left > 0:
            words.append(f"{show_seconds(bytes_left / self._bytes_run * seconds)} left")
        return ", ".join(words)

    def describe_end(self) -> list[str]:
        seconds = max(self._clock() - self._started, 1e-9)
        lines = [
            f"{self.num_run:,} requests in {show_seconds(seconds)}, {self.num_failed:,} of them failed; "
            f"{self._prompt_tokens:,} tokens read, {self._completion_tokens:,} generated "
            f"({self._completion_tokens / seconds:,.0f} tok/s)"
        ]
        if self.num_before:
            lines.append(
                f"{self.num_before:,} more were done before, {self.num_failed_before:,} of them failed"
            )
        for (status, code), count in self.errors.most_common(MAX_KINDS):
            lines.append(f"  {count:,} x {status} {code}")
        if len(self.errors) > MAX_KINDS:
            lines.append(f"  and {len(self.errors) - MAX_KINDS} other kinds of errors")
        return lines


def show_seconds(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"
