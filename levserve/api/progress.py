"""A bar for long lists, in terminals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager

LONG = 32
"""Prompts; shorter lists are done before anyone reads a bar."""


@contextmanager
def show_progress(given: object, is_wanted: bool | None) -> Iterator[Callable[[], object]]:
    """Yields a function to call for each item of `given` that is done."""
    total = len(given) if isinstance(given, Sized) and not isinstance(given, str) else None
    if is_wanted is None:
        is_wanted = sys.stderr is not None and sys.stderr.isatty() and (total is None or total >= LONG)
    if not is_wanted:
        yield lambda: None
        return
    from tqdm.auto import tqdm  # a widget in notebooks

    with tqdm(total=total, unit="prompt", dynamic_ncols=True) as bar:
        yield bar.update
