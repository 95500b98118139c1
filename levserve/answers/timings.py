"""Where a request's time went, as its answer reports it."""

from __future__ import annotations

from levserve.answers.answer import Timings


def make_timings(
    now: float,
    *,
    started: float,
    submitted: float | None,
    placed: float | None,
    first_token: float | None,
    num_tokens: int,
) -> Timings:
    """The timings up to `now`; all times are on one clock. A phase that has not begun took no time."""
    submitted = submitted or now
    placed = placed or now
    first = first_token or now
    num_later = num_tokens - 1
    return Timings(
        prepare_ms=_milliseconds(submitted - started),
        queue_ms=_milliseconds(placed - submitted),
        prefill_ms=_milliseconds(first - placed),
        first_token_ms=None if first_token is None else _milliseconds(first - started),
        decode_ms=_milliseconds(now - first),
        total_ms=_milliseconds(now - started),
        tokens_per_second=round(num_later / (now - first), 2) if num_later > 0 and now > first else None,
    )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
