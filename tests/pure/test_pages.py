"""The page pool: every page in one state, prefixes found exactly, the oldest forgotten first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from levserve.schedule.pages import ROOT, PagePool


def fill(pool: PagePool, tokens: list[int]) -> list[int]:
    """Holds pages for `tokens`, found or fresh, and remembers the full ones, as the scheduler does."""
    match = pool.match(tokens, len(tokens) - 1)
    rest = pool.take(-(-len(tokens) // pool.page_size) - len(match.pages))
    assert rest is not None
    pages = match.pages + rest
    serial = match.serial
    for index in range(len(match.pages), len(tokens) // pool.page_size):
        start = index * pool.page_size
        serial = pool.remember(pages[index], serial, tuple(tokens[start : start + pool.page_size]))
    return pages


def test_a_prompt_seen_before_reuses_its_full_pages() -> None:
    pool = PagePool(8, 4)
    first = fill(pool, list(range(10)))
    second = fill(pool, list(range(10)))
    assert second[:2] == first[:2] and second[2] != first[2]
    pool.check([first, second])


def test_a_match_is_no_longer_than_its_limit() -> None:
    pool = PagePool(8, 4)
    pool.release(fill(pool, list(range(8))))
    assert [len(pool.match(list(range(8)), limit).pages) for limit in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_equal_tokens_after_another_start_are_not_a_hit() -> None:
    pool = PagePool(8, 2)
    fill(pool, [1, 2, 3, 4, 9])
    assert pool.match([5, 6, 3, 4, 9], 4).pages == []
    assert pool.match([3, 4, 9], 2).pages == []


def test_pages_are_taken_from_the_least_recently_used_prefix_and_its_end_first() -> None:
    pool = PagePool(4, 2)
    pool.release(fill(pool, [1, 2, 3, 4]))
    pool.release(fill(pool, [5, 6, 7, 8]))
    taken = pool.take(1)
    assert taken is not None
    assert len(pool.match([1, 2, 3, 4, 0], 4).pages) == 1
    assert len(pool.match([5, 6, 7, 8, 0], 4).pages) == 2


def test_more_pages_than_there_are_is_none_and_changes_nothing() -> None:
    pool = PagePool(3, 2)
    held = pool.take(2)
    assert held is not None
    assert pool.take(2) is None
    pool.check([held])
    assert pool.num_available == 1


def test_the_same_content_twice_keeps_one_entry() -> None:
    pool = PagePool(4, 2)
    one, other = pool.take(1), pool.take(1)
    assert one is not None and other is not None
    assert pool.remember(one[0], ROOT, (1, 2)) == pool.remember(other[0], ROOT, (1, 2))
    pool.release(other)
    pool.check([one])
    assert pool.num_idle == 0


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=20),
    drops=st.lists(st.integers(0, 5), max_size=20),
)
def test_no_page_is_lost_or_held_twice_over_random_use(prompts: list[list[int]], drops: list[int]) -> None:
    pool = PagePool(16, 2)
    held: list[list[int]] = []
    for prompt, drop in zip(prompts, drops + [0] * len(prompts)):
        if pool.num_available >= 6:
            held.append(fill(pool, prompt))
        elif held:
            pool.release(held.pop(drop % len(held)))
        pool.check(held)
    for pages in held:
        pool.release(pages)
    pool.check([])
    assert pool.num_available == pool.num_pages
