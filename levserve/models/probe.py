"""A fixed text whose log-probabilities show at a glance what a set of weights makes of language.

A checkpoint that was read wrong gives it about minus the logarithm of the vocabulary's size per token; the largest
difference between two sets of weights says how far apart they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from levserve.engine.served_model import ServedModel
from levserve.schedule.request import GenerationRequest, Sampling

TEXT = "The sun rises in the east and sets in the west. Water boils at one hundred degrees, and two and two are four."
MAX_TOKENS = 32  # one small prefill


def probe_request(model: ServedModel) -> GenerationRequest:
    """Scores the text's tokens after the first, and generates nothing."""
    tokens = model.tokenizer.encode(TEXT)
    if len(set(tokens)) < 8:  # a vocabulary that does not know these words
        tokens = [number % model.tokenizer.vocab_size for number in range(3, 3 + MAX_TOKENS)]
    prompt = tuple(tokens[: min(MAX_TOKENS, model.max_seq_len)])
    return GenerationRequest(
        f"probe-{os.urandom(4).hex()}", prompt, 0, Sampling(temperature=0.0, num_logprobs=0), score_from=1
    )


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


def mean(scores: Sequence[float]) -> float:
    return sum(scores) / max(len(scores), 1)
