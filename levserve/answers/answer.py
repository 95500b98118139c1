"""The objects that clients get back: OpenAI's, whole or as the chunks of a stream.

Used on HTTP threads and by batches. An `Answer` belongs to one request: it keeps what all its objects share
(id, time, model) and turns the deltas of a choice into OpenAI's choice objects. A chunk shows one part of a
delta; a whole answer shows all of them joined.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from levserve import __version__
from levserve.answers.logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs, chat_logprobs, text_logprobs
from levserve.answers.message import AnswerMessage, has_call, piece_messages, whole_message
from levserve.engine.served_model import ServedModel
from levserve.generation import Choice, Delta
from levserve.schedule.request import FinishReason

FINGERPRINT = f"levserve-{__version__}"
TokenIds = Sequence[int]


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class ReasoningTokens(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens
    """The tokens of thoughts, which `completion_tokens` counts too."""


class Timings(Struct, frozen=True):
    """Where a request's time went, in milliseconds; the four phases add up to the total."""

    prepare_ms: float
    """From its arrival until it is handed to the device thread: parsing, the chat template, tokenizing."""
    queue_ms: float
    """Until the first of its sequences has a row."""
    prefill_ms: float
    """Until the first token of any choice."""
    first_token_ms: float | None
    """From its arrival to the first token of any choice; null if there is none."""
    decode_ms: float
    """From the first token to the end."""
    total_ms: float
    tokens_per_second: float | None
    """Over `decode_ms`, all choices together, without the first token."""


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


ChoiceKind = TypeVar("ChoiceKind", bound=TextChoice | ChatChoice | ChatChunkChoice)


class Envelope(Struct, Generic[ChoiceKind], frozen=True):
    """The object around the choices. A whole answer has usage; in a chunk it is null or left out."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChoiceKind]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str = FINGERPRINT
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: Sequence[str] | UnsetType = UNSET
    """In a whole answer and in the last chunk of each choice."""


class Answer(ABC):
    """The answer to one HTTP request, on its thread; a subclass knows the shape of its endpoint."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    has_one_prompt: ClassVar[bool] = False
    """Whether the prompt's scores and ids stand beside the choices instead of in each, as in vLLM."""

    def __init__(
        self,
        model: ServedModel,
        model_name: str = "",
        warnings: Sequence[str] = (),
        *,
        is_function: bool = False,
        shown_prompts: Sequence[TokenIds] | None = None,
        num_choices: int = 1,
    ) -> None:
        self._id = f"{self.id_prefix}{random.getrandbits(96):024x}"  # os.urandom would release the GIL
        self._created = int(time.time())
        self._model = model_name or model.name
        self._tokenizer = model.tokenizer
        self._warnings = warnings or UNSET
        self._is_function = is_function
        """Whether the client sent `functions` and not `tools`, so that it knows only `function_call`."""
        self._shown_prompts = shown_prompts
        self._num_choices = num_choices

    @property
    def shows_token_ids(self) -> bool:
        """Whether the client asked for the ids of all tokens."""
        return self._shown_prompts is not None

    def whole(
        self,
        deltas: Sequence[Delta],
        usage: Usage,
        scores: Sequence[PromptLogprobs] = (),
        timings: Timings | UnsetType = UNSET,
    ) -> Envelope[TextChoice | ChatChoice]:
        """The body of an answer that is not streamed.

        `deltas` holds each choice's joined delta, and `scores` each prompt's scores if they were asked for.
        """
        choices = []
        num_choices = len(deltas) // max(len(scores), 1)
        for index, delta in enumerate(deltas):
            prompt_scores = scores[index // num_choices] if scores else UNSET
            choices.append(self._choice(index, delta, prompt_scores))
        shared = scores[0] if scores and self.has_one_prompt else UNSET
        return Envelope(
            self._id,
            self.whole_object,
            self._created,
            self._model,
            choices,
            usage,
            prompt_logprobs=shared,
            prompt_token_ids=self._shared_prompt(),
            timings=timings,
            warnings=self._warnings,
        )

    def chunk(
        self,
        choices: Sequence[TextChoice | ChatChunkChoice],
        usage: Usage | UnsetType | None,
        timings: Timings | UnsetType = UNSET,
        *,
        is_opening: bool = False,
    ) -> bytes:
        """The JSON of one event of a stream."""
        is_end = any(choice.finish_reason is not None for choice in choices)
        return msgspec.json.encode(
            Envelope(
                self._id,
                self.chunk_object,
                self._created,
                self._model,
                choices,
                usage,
                prompt_token_ids=self._shared_prompt() if is_opening else UNSET,
                timings=timings,
                warnings=self._warnings if is_end else UNSET,
            )
        )

    @abstractmethod
    def opening(self, index: int) -> TextChoice | ChatChunkChoice | None:
        """What a stream says about a choice before its first text, if anything."""

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> Sequence[TextChoice | ChatChunkChoice]:
        """A delta's text or parts; the first has the log-probabilities, if there are any."""

    @abstractmethod
    def ending(self, index: int, finish: FinishReason, *, has_call: bool) -> TextChoice | ChatChunkChoice:
        """What a stream says about a choice after its last text."""

    @abstractmethod
    def _choice(
        self, index: int, delta: Delta, scores: PromptLogprobs | UnsetType
    ) -> TextChoice | ChatChoice: ...

    def _shared_prompt(self) -> TokenIds | UnsetType:
        return UNSET if self._shown_prompts is None or not self.has_one_prompt else self._shown_prompts[0]

    def _prompt_of(self, index: int) -> TokenIds | UnsetType:
        return UNSET if self._shown_prompts is None else self._shown_prompts[index // self._num_choices]

    def _ids(self, delta: Delta) -> TokenIds | UnsetType:
        """The ids of the tokens that were generated; an echoed prompt is not among them."""
        return UNSET if self._shown_prompts is None else delta.tokens[delta.num_echoed :]


class TextAnswer(Answer):
    """The answer of /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def opening(self, index: int) -> TextChoice | None:
        if not self.shows_token_ids:
            return None
        return TextChoice(index, "", prompt_token_ids=self._prompt_of(index), token_ids=())

    def delta(self, index: int, delta: Delta) -> list[TextChoice]:
        logprobs = text_logprobs(delta, self._tokenizer)
        return [TextChoice(index, delta.text, logprobs, token_ids=self._ids(delta))]

    def ending(self, index: int, finish: FinishReason, *, has_call: bool) -> TextChoice:
        return TextChoice(index, "", None, *_reasons(finish))

    def _choice(self, index: int, delta: Delta, scores: PromptLogprobs | UnsetType) -> TextChoice:
        logprobs = text_logprobs(delta, self._tokenizer)
        ids = self._prompt_of(index), self._ids(delta)
        return TextChoice(index, delta.text, logprobs, *_reasons(delta.finish), scores, *ids)


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    has_one_prompt = True

    def opening(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index, AnswerMessage("assistant", ""))

    def delta(self, index: int, delta: Delta) -> list[ChatChunkChoice]:
        if delta.parts is None:
            messages = [AnswerMessage(content=delta.text)]
        else:
            messages = [*piece_messages(delta.parts, is_function=self._is_function)]
        logprobs = chat_logprobs(delta, self._tokenizer)
        if not messages and (logprobs is not None or (self.shows_token_ids and delta.tokens)):
            messages = [AnswerMessage(content="")]
        chunks = [ChatChunkChoice(index, message) for message in messages]
        if chunks:
            chunks[0] = ChatChunkChoice(index, messages[0], logprobs, token_ids=self._ids(delta))
        return chunks

    def ending(self, index: int, finish: FinishReason, *, has_call: bool) -> ChatChunkChoice:
        return ChatChunkChoice(index, AnswerMessage(), None, *self._reasons(finish, has_call))

    def _choice(self, index: int, delta: Delta, scores: PromptLogprobs | UnsetType) -> ChatChoice:
        if delta.parts is None:
            message = AnswerMessage("assistant", delta.text, refusal=None)
        else:
            message = whole_message(delta.parts, is_function=self._is_function)
        logprobs = chat_logprobs(delta, self._tokenizer)
        reasons = self._reasons(delta.finish, has_call(delta.parts) and not delta.cuts_call)
        return ChatChoice(index, message, logprobs, *reasons, self._ids(delta))

    def _reasons(self, finish: FinishReason | None, has_call: bool) -> tuple[str | None, str | UnsetType]:
        """A choice that ended by itself after a complete call waits for the tool's result."""
        if finish is FinishReason.STOP and has_call:
            return "function_call" if self._is_function else "tool_calls", UNSET
        return _reasons(finish)


def _reasons(finish: FinishReason | None) -> tuple[FinishReason | None, str | UnsetType]:
    """OpenAI's `finish_reason`, and a `stop_reason` where that says more: time ran out, not tokens."""
    return (FinishReason.LENGTH, finish.value) if finish is FinishReason.DEADLINE else (finish, UNSET)


def count_usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> Usage:
    """The totals of an answer. A prompt and its cached tokens count once, however many choices it has."""
    num_choices = len(choices) // len(prompts)
    num_prompt = sum(len(prompt) for prompt in prompts)
    num_completion = sum(choice.num_tokens for choice in choices)
    num_cached = 0
    for start in range(0, len(choices), num_choices):
        # A prompt's later choices find in the cache what the first one has just computed, so only the
        # smallest number was really saved.
        num_cached += min(choice.num_cached for choice in choices[start : start + num_choices])
    num_thought = sum(choice.num_thought_tokens for choice in choices)
    return Usage(
        num_prompt,
        num_completion,
        num_prompt + num_completion,
        CachedTokens(num_cached),
        ReasoningTokens(num_thought),
    )
