"""Log-probabilities in the three shapes clients know: of a chat, of a completion, and vLLM's of a prompt.

Used on HTTP threads and by batches. A token that is among its own alternatives has exactly the same
value in both places; lm-evaluation-harness recognizes a greedy choice by that.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from levserve.generation import Delta
from levserve.schedule.request import TokenLogprob
from levserve.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI uses this value for "very unlikely"


class LikelyToken(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChosenToken]
    refusal: None = None


class TextLogprobs(Struct, frozen=True):
    """Parallel lists, one entry per token; `text_offset` counts characters of the choice's text.

    A prompt's first token has nulls: nothing comes before it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedToken(Struct, frozen=True):
    """`rank` counts from 1 among the likeliest; a prompt's token that is not among them has none."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, RankedToken] | None]
"""For each token of a prompt the token itself and the likeliest in its place, by id; null for the first."""


def chat_logprobs(delta: Delta, tokenizer: Tokenizer) -> ChatLogprobs | None:
    if not delta.logprobs:
        return None
    pairs = zip(delta.tokens, delta.logprobs, strict=True)
    return ChatLogprobs(
        [_chosen_token(token, logprob, tokenizer) for token, logprob in pairs if logprob is not None]
    )


def text_logprobs(delta: Delta, tokenizer: Tokenizer) -> TextLogprobs | None:
    if not delta.logprobs:
        return None
    return TextLogprobs(
        [show_token(token, tokenizer) for token in delta.tokens],
        [None if logprob is None else clamp(logprob.logprob) for logprob in delta.logprobs],
        [
            _top_by_text(token, logprob, tokenizer)
            for token, logprob in zip(delta.tokens, delta.logprobs, strict=True)
        ],
        list(delta.offsets),
    )


def prompt_logprobs(
    prompt: Sequence[int], scores: Sequence[TokenLogprob], num_top: int, tokenizer: Tokenizer
) -> PromptLogprobs:
    return [
        None,
        *(_ranked(token, score, num_top, tokenizer) for token, score in zip(prompt[1:], scores, strict=True)),
    ]


def show_token(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token).decode(errors="replace")


def clamp(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # this way round NaN is clamped too


def _chosen_token(token: int, logprob: TokenLogprob, tokenizer: Tokenizer) -> ChosenToken:
    top = [
        LikelyToken(show_token(other, tokenizer), clamp(value), list(tokenizer.token_bytes(other)))
        for other, value in logprob.top
    ]
    return ChosenToken(
        show_token(token, tokenizer), clamp(logprob.logprob), list(tokenizer.token_bytes(token)), top
    )


def _top_by_text(token: int, logprob: TokenLogprob | None, tokenizer: Tokenizer) -> dict[str, float] | None:
    """The likeliest tokens and always the chosen one; of two with the same text the likelier one."""
    if logprob is None:
        return None
    by_text: dict[str, float] = {}
    for other, value in (*logprob.top, (token, logprob.logprob)):
        text = show_token(other, tokenizer)
        by_text[text] = max(clamp(value), by_text.get(text, LEAST_LOGPROB))
    return by_text


def _ranked(token: int, score: TokenLogprob, num_top: int, tokenizer: Tokenizer) -> dict[int, RankedToken]:
    ranks = {other: (value, rank) for rank, (other, value) in enumerate(score.top[:num_top], start=1)}
    # VLLM's order: the prompt's own token comes first.
    entries = {token: ranks.get(token, (score.logprob, None))} | ranks
    return {
        other: RankedToken(clamp(value), rank, show_token(other, tokenizer))
        for other, (value, rank) in entries.items()
    }
