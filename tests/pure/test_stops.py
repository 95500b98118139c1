"""Stop strings: cut exactly, held back no longer than needed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levserve.errors import BadRequest
from levserve.text.stops import StopStrings

LETTERS = st.text("ab", max_size=12)  # two letters make overlaps and near misses common
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def feed(stops: StopStrings, pieces: Sequence[str]) -> str:
    return "".join([*(stops.add(piece) for piece in pieces), stops.flush()])


def first_match(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """The rule in `StopStrings`: the stop string that is complete first wins, then the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths), end
    return None


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS, include=st.booleans())
def test_text_is_cut_at_the_first_match_however_it_is_split(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(pieces)
    match = first_match(text, stops)
    filter_ = StopStrings(stops, include=include)
    shown = feed(filter_, pieces)
    assert filter_.is_matched == (match is not None)
    assert shown == (text if match is None else text[: match[include]])


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_only_the_longest_tail_that_could_become_a_stop_is_held(pieces: list[str], stops: list[str]) -> None:
    filter_ = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += filter_.add(piece)
        if filter_.is_matched:
            return
        tails = [seen[start:] for start in range(len(seen) + 1)]
        held = next(tail for tail in tails if any(stop.startswith(tail) for stop in stops) or not tail)
        assert shown + held == seen


def test_stop_across_three_pieces_is_never_seen() -> None:
    stops = StopStrings(["<stop>"])
    assert [stops.add(piece) for piece in ("one <s", "to", "p> two", "three")] == ["one ", "", "", ""]
    assert stops.is_matched
    assert stops.matched == "<stop>"
    assert stops.flush() == ""


def test_near_miss_is_shown_as_soon_as_it_is_one() -> None:
    stops = StopStrings(["<stop>"])
    assert stops.add("a <st") == "a "
    assert stops.add("ar <") == "<star "
    assert stops.flush() == "<"


def test_match_that_is_complete_first_wins_over_one_that_started_before_it() -> None:
    assert feed(StopStrings(["abcd", "bc"]), ["xabcd"]) == "xa"


def test_of_two_stops_that_end_together_the_longer_is_cut() -> None:
    assert feed(StopStrings(["cd", "bcd"]), ["abcd"]) == "a"


def test_included_stop_is_the_last_text_shown() -> None:
    stops = StopStrings(["\n\n"], include=True)
    assert stops.add("one\n") == "one"
    assert stops.add("\ntwo") == "\n\n"
    assert stops.add("three") == ""


def test_text_passes_untouched_without_stops() -> None:
    stops = StopStrings([])
    assert stops.add("anything") == "anything"
    assert not stops.is_matched


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"


def test_long_stop_on_text_full_of_near_misses_takes_linear_time() -> None:
    """Comparing tails one by one would take some 10**9 steps here."""
    stops = StopStrings(["a" * 20_000 + "b"])
    assert sum(len(stops.add("a" * 4)) for _ in range(10_000)) == 20_000
