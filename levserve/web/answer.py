"""What clients get back: the objects of the OpenAI contract, whole and in pieces.

Used on HTTP threads. An `Answer` is one HTTP request's: it keeps what all its objects share (id, time, model) and turns the
deltas of a choice into OpenAI's choice objects. The same delta record serves a piece of a stream and, joined, a whole answer.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from levserve import __version__
from levserve.engine.engine import ServedModel
from levserve.errors import ServeError
from levserve.generation import Choice, Delta
from levserve.schedule.request import FinishReason, TokenLogprob
from levserve.text.tokenizer import Tokenizer

FINGERPRINT = f"levserve-{__version__}"
LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI says "very unlikely" with this number


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    error: ErrorDetail


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


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
    """Parallel lists, one entry a token; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class Message(Struct, frozen=True):
    """A chat message or, with what is new in it, a delta of one."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: None | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatPiece(Struct, frozen=True):
    index: int
    delta: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class Envelope(Struct, frozen=True):
    """The object around the choices. Whole answers carry usage; chunks a null or nothing, as the client asked."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[TextChoice | ChatChoice | ChatPiece]
    usage: Usage | None | UnsetType
    system_fingerprint: str = FINGERPRINT


class Answer(ABC):
    """One HTTP request's answer; a subclass knows the shape of its endpoint. Belongs to one HTTP thread."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    piece_object: ClassVar[str]

    def __init__(self, model: ServedModel) -> None:
        self._id = f"{self.id_prefix}{os.urandom(12).hex()}"
        self._created = int(time.time())
        self._model = model.name
        self._tokenizer = model.tokenizer

    def whole(self, deltas: Iterable[Delta], usage: Usage) -> bytes:
        """The body of a blocking answer, from each choice's joined delta."""
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        return msgspec.json.encode(Envelope(self._id, self.whole_object, self._created, self._model, choices, usage))

    def chunk(self, choices: Sequence[TextChoice | ChatPiece], usage: Usage | None | UnsetType) -> bytes:
        """The JSON of one event of a stream."""
        return msgspec.json.encode(Envelope(self._id, self.piece_object, self._created, self._model, choices, usage))

    @abstractmethod
    def opening(self, index: int) -> TextChoice | ChatPiece | None:
        """What a stream says of a choice before its first text."""

    @abstractmethod
    def piece(self, index: int, delta: Delta) -> TextChoice | ChatPiece:
        """The text of a delta, and its log-probabilities if it has any."""

    @abstractmethod
    def ending(self, index: int, finish: FinishReason) -> TextChoice | ChatPiece:
        """What a stream says of a choice after its last text."""

    @abstractmethod
    def _choice(self, index: int, delta: Delta) -> TextChoice | ChatChoice: ...


class TextAnswer(Answer):
    """The answer of /v1/completions."""

    id_prefix, whole_object, piece_object = "cmpl-", "text_completion", "text_completion"

    def opening(self, index: int) -> None:
        return None

    def piece(self, index: int, delta: Delta) -> TextChoice:
        return TextChoice(index, delta.text, _text_logprobs(delta, self._tokenizer))

    def ending(self, index: int, finish: FinishReason) -> TextChoice:
        return TextChoice(index, "", None, finish)

    def _choice(self, index: int, delta: Delta) -> TextChoice:
        return TextChoice(index, delta.text, _text_logprobs(delta, self._tokenizer), delta.finish)


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    id_prefix, whole_object, piece_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> ChatPiece:
        return ChatPiece(index, Message("assistant", ""))

    def piece(self, index: int, delta: Delta) -> ChatPiece:
        return ChatPiece(index, Message(content=delta.text), _chat_logprobs(delta, self._tokenizer))

    def ending(self, index: int, finish: FinishReason) -> ChatPiece:
        return ChatPiece(index, Message(), None, finish)

    def _choice(self, index: int, delta: Delta) -> ChatChoice:
        message = Message("assistant", delta.text, refusal=None)
        return ChatChoice(index, message, _chat_logprobs(delta, self._tokenizer), delta.finish)


def count_usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> Usage:
    """The totals of an answer. A prompt counts once however many choices it has, and so do its cached tokens."""
    num_choices = len(choices) // len(prompts)
    num_prompt = sum(len(prompt) for prompt in prompts)
    num_completion = sum(choice.num_tokens for choice in choices)
    # The later choices of a prompt find it in the cache because the first one has just computed it: the least is what was saved.
    cached = (min(choice.num_cached for choice in choices[i : i + num_choices]) for i in range(0, len(choices), num_choices))
    return Usage(num_prompt, num_completion, num_prompt + num_completion, CachedTokens(sum(cached)))


def error_body(error: ServeError) -> bytes:
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


def _chat_logprobs(delta: Delta, tokenizer: Tokenizer) -> ChatLogprobs | None:
    if not delta.logprobs:
        return None
    return ChatLogprobs([_chosen_token(token, logprob, tokenizer) for token, logprob in zip(delta.tokens, delta.logprobs, strict=True)])


def _chosen_token(token: int, logprob: TokenLogprob, tokenizer: Tokenizer) -> ChosenToken:
    top = [LikelyToken(_show(other, tokenizer), _clamp(value), list(tokenizer.token_bytes(other))) for other, value in logprob.top]
    return ChosenToken(_show(token, tokenizer), _clamp(logprob.logprob), list(tokenizer.token_bytes(token)), top)


def _text_logprobs(delta: Delta, tokenizer: Tokenizer) -> TextLogprobs | None:
    if not delta.logprobs:
        return None
    return TextLogprobs(
        [_show(token, tokenizer) for token in delta.tokens],
        [_clamp(logprob.logprob) for logprob in delta.logprobs],
        [_top_by_text(token, logprob, tokenizer) for token, logprob in zip(delta.tokens, delta.logprobs, strict=True)],
        list(delta.offsets),
    )


def _top_by_text(token: int, logprob: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest tokens and always the chosen one; of two tokens with the same text the likelier stays."""
    by_text: dict[str, float] = {}
    for other, value in (*logprob.top, (token, logprob.logprob)):
        text = _show(other, tokenizer)
        by_text[text] = max(_clamp(value), by_text.get(text, LEAST_LOGPROB))
    return by_text


def _show(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token).decode(errors="replace")


def _clamp(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # this way round NaN is clamped too
