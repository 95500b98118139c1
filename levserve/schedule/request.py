"""The records that HTTP threads and the device thread exchange: requests, and what comes back."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from levserve.schedule.constraint import Constraint

BACKGROUND = 1 << 30
"""Requests of this priority and above are background work: it runs in the rounds that no other work needs."""


class FinishReason(StrEnum):
    """Why a request ended. The first two are regular ends of an answer; the rest say what cut it short."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    POISONED = "poisoned"
    """The model's results for it were not finite."""
    SHUTDOWN = "shutdown"
    FAILED = "failed"
    STUCK = "stuck"
    """Its constraint leaves no token, or has become too costly to follow."""


class LogprobsMode(StrEnum):
    """Which log-probabilities of generated tokens are wanted; the names are vLLM's."""

    RAW = "raw_logprobs"
    """The model's own."""
    PROCESSED = "processed_logprobs"
    """Those of the distribution that tokens are drawn from: after penalties, biases, temperature, top-k,
    top-p and min-p."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are drawn; every field at its default changes nothing."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    seed: int = 0
    """The draw is a function of this and the position alone; a client that gives none gets a fresh one."""
    num_logprobs: int | None = None
    """None: no log-probabilities; 0: those of the chosen tokens; n: also of the n likeliest."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to continue, to score, or both. Already checked: it fits the model and the pool."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    """0: the prompt is computed, scored or pooled, and nothing is generated."""
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    deadline: float | None = None
    """On `time.monotonic`'s clock."""
    score_from: int | None = None
    """First position, at least 1, whose prompt token's log-probability is wanted, with `num_logprobs`
    alternatives."""
    scores_in_one_pass: bool = False
    """Whether all scores come from one run over the whole prompt, whose positions see what they score."""
    wants_hidden: bool = False
    """Whether the prompt's last hidden states are wanted, pooled."""
    constraint: Constraint | None = None
    """What the generated text is held to."""
    shares_prompt_of: str | None = None
    """The id of an earlier request with the very same prompt, which need not be computed again."""
    priority: int = 0
    """Requests with a smaller number are served first, and those with the same in the order of arrival."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token's log-probability and those of the likeliest tokens: under the model, before
    temperature and penalties, unless the request's `logprobs_mode` says otherwise."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PooledHidden:
    """A prompt's hidden states after the last layer's norm, pooled in the two usual ways; float32, one value
    per dimension."""

    mean: array[float]
    last: array[float]


class TokenBatch(NamedTuple):
    """The tokens one request gained in one round; `finish` is set on the last batch only.

    A stop token ends the request and is not among the tokens. This is a tuple, like everything made for every
    row of every round: making a frozen dataclass takes three times as long.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    num_cached: int = 0
    """Prompt tokens that were found in the prefix cache."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Those of the prompt's tokens from `score_from` on, in order, as they are computed; all come before the
    first token."""
    hidden: PooledHidden | None = None
    """Set at the end of the prompt, if it was asked for."""
