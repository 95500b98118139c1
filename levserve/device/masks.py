"""Makes the masks of all rows that are held to a constraint in one round.

A mask takes 10 to 500 microseconds. Masks of grammars are made together: on several threads if there are
enough cores, and with the GIL released once for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from levserve.observe.control_group import num_cpus
from levserve.schedule.constraint import Matcher
from levserve.text.grammar_matcher import GrammarMatcher

MIN_CORES = 4
"""With two cores, separate threads for masks are no faster."""
MAX_THREADS = 8


def fill_masks(words: npt.NDArray[np.uint32], matchers: Seq[Matcher], executor: LLExecutor | None) -> None:
    """Writes each matcher's mask into its row of [row, word], which must be all zeros."""
    together: list[tuple[GrammarMatcher, int]] = []
    for row, matcher in enumerate(matchers):
        is_open = not matcher.forced() and not matcher.is_stuck
        if executor is not None and isinstance(matcher, GrammarMatcher) and is_open:
            together.append((matcher, row))
        else:
            words[row] = np.frombuffer(matcher.mask(), np.uint32)
    if executor is not None and together:
        _fill_together(executor, words, together)


def _fill_together(
    executor: LLExecutor, words: npt.NDArray[np.uint32], together: Seq[tuple[GrammarMatcher, int]]
) -> None:
    num_words = together[0][0].num_mask_words  # the same for all: they share a vocabulary
    masks = np.zeros((len(together), num_words), np.uint32)
    makers = [(matcher.mask_maker, index) for index, (matcher, _) in enumerate(together)]
    executor.unsafe_compute_mask_ptr(makers, masks.ctypes.data, num_words * 4, len(together))
    num_kept = min(num_words, words.shape[1])  # a tokenizer may have tokens without a row in the model
    words[[row for _, row in together], :num_kept] = masks[:, :num_kept]


@functools.cache
def mask_executor() -> LLExecutor | None:
    """Threads for masks, shared by all models of the process; None on a machine with few cores."""
    num_cores = num_cpus()
    return LLExecutor(min(num_cores // 2, MAX_THREADS)) if num_cores >= MIN_CORES else None
