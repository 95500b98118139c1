"""What the Python API gives back: plain frozen records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from levserve.generation import Delta
from levserve.schedule.request import TokenLogprob
from levserve.text.parts import CallArguments, CallStart, Part, join_calls, join_content, join_thoughts


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a result took. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """How many of the prompt's tokens did not have to be computed."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to one prompt."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    """One for each token, if they were asked for; else empty. An echoed prompt's first token has none."""
    finish_reason: str
    """`stop`, `length`, or `deadline` if the time ran out."""
    thoughts: str = ""
    """What the model wrote to itself before the answer, where it can be told apart."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one prompt. `text`, `tokens`, `logprobs` and `finish_reason` are of the first choice."""

    choices: tuple[Choice, ...]
    prompt: tuple[int, ...]
    """The prompt's tokens."""
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each token of the prompt, if they were asked for; None for the first, which follows nothing."""
    warnings: tuple[str, ...] = ()
    """Where the model's settings kept it from doing what was asked."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.choices[0].tokens

    @property
    def logprobs(self) -> tuple[TokenLogprob | None, ...]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice gained: a piece of text, and on its last piece why it ended and the calls of tools."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: str | None = None
    index: int = 0
    """The number of the choice, where `n` is above 1."""
    thoughts: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """All calls of the choice, whole; on its last piece."""


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is after its prompt."""

    logprob: float
    """The sum over the continuation's tokens."""
    is_greedy: bool
    """Whether each token was the likeliest in its place."""
    tokens: tuple[int, ...]
    """The continuation's tokens."""
    token_logprobs: tuple[float, ...]


def make_choice(delta: Delta) -> Choice:
    """Makes a choice from its joined delta."""
    assert delta.finish is not None
    parts = delta.shown
    return Choice(
        join_content(parts),
        delta.tokens,
        delta.logprobs,
        delta.finish.value,
        join_thoughts(parts),
        _make_calls(parts),
    )


class PieceMaker:
    """Makes the pieces of one stream, and keeps the calls of each choice until it ends. For one thread."""

    def __init__(self) -> None:
        self._parts: defaultdict[int, list[Part]] = defaultdict(list)

    def make(self, index: int, delta: Delta) -> Piece:
        shown = delta.shown
        parts = self._parts[index]
        parts += (part for part in shown if isinstance(part, (CallStart, CallArguments)))
        text, thoughts = join_content(shown), join_thoughts(shown)
        if delta.finish is None:
            return Piece(text, delta.tokens, delta.logprobs, None, index, thoughts)
        finish = delta.finish.value
        return Piece(text, delta.tokens, delta.logprobs, finish, index, thoughts, _make_calls(parts))


def _make_calls(parts: Sequence[Part]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(start.id, start.name, arguments) for start, arguments in join_calls(parts))
