"""Finds where two answers to one question part, and how far apart their log-probabilities are until then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kinds import Token

CONTEXT = 24  # characters of each answer that are shown from where they part


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to one question, and its times. With a `failure`, the rest is what came before it."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    """As the server listed them; empty where it lists none."""
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_seconds: float | None = None
    itl_seconds: float | None = None
    total_seconds: float = 0.0
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """How another answer differs from the first. `at_token` and the log-probabilities need both lists of tokens."""

    at_char: int | None = None
    at_token: int | None = None
    first: str = ""
    """How the first answer goes on from where they part; `other` is the same of the other answer."""
    other: str = ""
    logprob_differences: Sequence[float] = field(default=())
    """For each token that both answers have before they part."""

    @property
    def is_same(self) -> bool:
        return self.at_char is None


def find_difference(first: Answer, other: Answer) -> Difference:
    differences = compare_logprobs(first.tokens, other.tokens)
    if first.text == other.text:
        return Difference(logprob_differences=differences)
    at = count_same(first.text, other.text)
    at_token = count_shared(first.tokens, other.tokens) if first.tokens and other.tokens else None
    return Difference(
        at,
        at_token,
        show_rest(first, at, at_token),
        show_rest(other, at, at_token),
        differences,
    )


def count_same(first: Sequence[object], other: Sequence[object]) -> int:
    """The length of the common beginning."""
    count = 0
    for one, two in zip(first, other):
        if one != two:
            break
        count += 1
    return count


def count_shared(first: Sequence[Token], other: Sequence[Token]) -> int:
    """The number of tokens at the beginning whose texts are the same."""
    return count_same([token.text for token in first], [token.text for token in other])


def compare_logprobs(first: Sequence[Token], other: Sequence[Token]) -> list[float]:
    shared = count_shared(first, other)
    differences = []
    for one, two in zip(first[:shared], other[:shared]):
        if one.logprob is not None and two.logprob is not None:
            differences.append(abs(one.logprob - two.logprob))
    return differences


def show_rest(answer: Answer, at_char: int, at_token: int | None) -> str:
    """The text from here on, and the log-probability of its first token, by which a near tie shows."""
    start = at_char
    if at_token is not None:  # from the beginning of the token: two words may share their first letters
        start = min(at_char, sum(len(token.text) for token in answer.tokens[:at_token]))
    rest = answer.text[start : start + CONTEXT]
    shown = repr(rest) if rest else f"the end ({answer.finish})"
    if at_token is None or at_token >= len(answer.tokens):
        return shown
    logprob = answer.tokens[at_token].logprob
    return shown if logprob is None else f"{shown} ({logprob:.2f})"
