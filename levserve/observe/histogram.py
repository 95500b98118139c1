"""A histogram that is cheap to fill from a round of many rows and cheap to write on the metrics page."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Any

from prometheus_client import Histogram
from prometheus_client.utils import floatToGoString

PLAIN_BELOW = 1e6  # from here on Go writes exponents


class PageHistogram(Histogram):
    """Has no labels. `observe_rows` is the device thread's, `numbers` is for one reader at a time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seen: list[float] = []
        self._numbers: tuple[str, ...] = ()

    def observe_rows(self, amount: float, num_rows: int) -> None:
        """Does what `num_rows` calls of `observe` would do."""
        self._sum.inc(amount * num_rows)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(num_rows)

    def numbers(self) -> tuple[str, ...]:
        """Each bucket's cumulative count, the total count and the sum, as the page shows them.

        While nothing is observed, every call returns the same object.
        """
        # Read without their locks, which would take five times as long: reading a float is atomic.
        seen = [bucket._value for bucket in self._buckets]
        seen.append(self._sum._value)
        if seen != self._seen or not self._numbers:
            total = seen[-1]
            counts = [write_number(count) for count in accumulate(seen[:-1])]
            self._numbers = (*counts, counts[-1], write_number(total))
            self._seen = seen
        return self._numbers

    def bounds(self) -> list[str]:
        return [_write_any(bound) for bound in self._upper_bounds]


def write_number(value: float) -> str:
    return repr(value) if 0 <= value < PLAIN_BELOW and type(value) is float else _write_any(value)


def _write_any(value: float) -> str:
    written: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return written
