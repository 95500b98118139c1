"""Turns a request line into work: the sequences to run, and the body that HTTP would answer with.

Called on the thread that runs a batch. Raises the same errors as the endpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from levserve.answers.answer import Answer, ChatAnswer, TextAnswer, Timings, count_usage
from levserve.answers.embeddings import EmbeddingBody, prepare_embeddings
from levserve.answers.scoring import ScoreBody, prepare_scores
from levserve.answers.timings import make_timings
from levserve.answers.whole import join_answered, make_answer, show_prompts
from levserve.engine.admission import Admission
from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest, NotFound
from levserve.generation import Choice, Delta
from levserve.models.handle import ModelHandle
from levserve.request.decode import decode
from levserve.request.policy import Policy
from levserve.request.schema import ChatBody, CompletionBody
from levserve.request.submission import Seeds, count_reserved, prepare
from levserve.request.truncation import Truncation
from levserve.request.waves import split_waves
from levserve.schedule.request import GenerationRequest
from levserve.text.stops import StopStrings

GENERATING: dict[str, tuple[type[ChatBody] | type[CompletionBody], type[Answer]]] = {
    "/v1/chat/completions": (ChatBody, ChatAnswer),
    "/v1/completions": (CompletionBody, TextAnswer),
}
"""Endpoints whose answers can also stream, each with the classes of its body and its answer."""
COMPUTING: dict[str, type[EmbeddingBody] | type[ScoreBody]] = {
    "/v1/embeddings": EmbeddingBody,
    "/loglikelihood": ScoreBody,
}
ENDPOINTS = (*GENERATING, *COMPUTING)
MAX_OWN_PRIORITY = 1000
"""A line's own priority orders it among others of its kind; it never lifts a batch above live requests."""

Body = ChatBody | CompletionBody | EmbeddingBody | ScoreBody
Gathered = Sequence[Sequence[Delta]]
"""The deltas of each sequence of a part."""


class Part(NamedTuple):
    """Sequences that are admitted together and run together."""

    requests: Sequence[GenerationRequest]
    choices: Sequence[Choice]
    num_tokens: int


class Moments(NamedTuple):
    """When a line's work reached each of its stages, on `time.monotonic`'s clock."""

    started: float
    submitted: float | None = None
    placed: float | None = None
    first_token: float | None = None


class LineWork(NamedTuple):
    """The work of one line. `finish` makes the body once every part has ended."""

    parts: Sequence[Part]
    finish: Callable[[Sequence[Gathered], Moments], bytes]

    @property
    def num_sequences(self) -> int:
        return sum(len(part.requests) for part in self.parts)

    @property
    def prompt_tokens(self) -> int:
        """A prompt counts once, however many choices it has."""
        own = (one for part in self.parts for one in part.requests if one.shares_prompt_of is None)
        return sum(len(request.prompt) for request in own)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for part in self.parts for choice in part.choices)


class Limits(NamedTuple):
    """Limits and priority that apply to every line of a batch."""

    admission: Admission
    max_wave: int
    base_priority: int = 0


def read_body(url: str, method: str, data: bytes) -> Body:
    """The checked body of a line; raises what the endpoint would raise, and errors that only batches have."""
    if method != "POST":
        raise BadRequest("'method' must be \"POST\".", param="method")
    if url not in ENDPOINTS:
        raise NotFound(
            f"Batches do not support the url '{url[:64]}'; they support {', '.join(ENDPOINTS)}.", param="url"
        )
    if url in COMPUTING:
        return decode(data, COMPUTING[url])
    body = decode(data, GENERATING[url][0])
    if body.stream:
        raise BadRequest("A batch does not stream; leave 'stream' out.", param="stream")
    return body


def make_work(
    body: Body, handle: ModelHandle, policy: Policy, seeds: Seeds, engine_id: str, limits: Limits
) -> LineWork:
    """Tokenizes the body and checks it against the model."""
    body = _with_priority(body, limits.base_priority)
    deadline = None if body.timeout is None else time.monotonic() + body.timeout
    if isinstance(body, (ChatBody, CompletionBody)):
        return _generate(body, handle, policy, seeds, engine_id, deadline, limits.admission)
    model = handle.model
    truncation = Truncation(body.truncate_prompt_tokens, policy.truncates_prompts)
    if isinstance(body, ScoreBody):
        scores = prepare_scores(body, model, truncation, engine_id, deadline)
        return _compute(scores.requests, scores.answer, model, limits)
    vectors = prepare_embeddings(body, model, handle.name, truncation, engine_id, deadline)
    return _compute(vectors.requests, vectors.answer, model, limits)


def _with_priority(body: Body, base: int) -> Body:
    if not base:
        return body
    own = min(max(body.priority or 0, 0), MAX_OWN_PRIORITY)
    return structs.replace(body, priority=base + own)


def _generate(
    body: ChatBody | CompletionBody,
    handle: ModelHandle,
    policy: Policy,
    seeds: Seeds,
    engine_id: str,
    deadline: float | None,
    admission: Admission,
) -> LineWork:
    answer_kind: type[Answer] = ChatAnswer if isinstance(body, ChatBody) else TextAnswer
    model = handle.model
    allowed, warnings = policy.apply_to(body)
    admission.check(allowed.num_prompts * allowed.num_sequences, 0, allowed.choices_param)
    prompts, requests, choices, cuts = prepare(allowed, model, seeds, engine_id, deadline, policy)
    num_tokens = count_reserved(requests, allowed, model)
    admission.check(len(requests), num_tokens, "max_tokens")

    def finish(gathered: Sequence[Gathered], moments: Moments) -> bytes:
        timings: Timings | UnsetType = UNSET
        if allowed.timings:
            num_generated = sum(choice.num_tokens for choice in choices)
            timings = make_timings(time.monotonic(), **moments._asdict(), num_tokens=num_generated)
        answer = make_answer(answer_kind, allowed, model, handle.name, prompts, [*warnings, *cuts])
        deltas = join_answered(allowed, choices, gathered[0])
        scores = show_prompts(allowed, prompts, choices, model.tokenizer)
        return msgspec.json.encode(answer.whole(deltas, count_usage(prompts, choices), scores, timings))

    return LineWork([Part(requests, choices, num_tokens)], finish)


def _compute(
    requests: Sequence[GenerationRequest],
    answer: Callable[[Sequence[Choice]], Struct],
    model: ServedModel,
    limits: Limits,
) -> LineWork:
    """Work that generates nothing, in parts small enough for the engine to admit."""
    choices = [Choice(model.tokenizer.detokenizer(), StopStrings(())) for _ in requests]
    sizes = [len(request.prompt) for request in requests]
    parts = [
        Part(requests[wave], choices[wave], sum(sizes[wave]))
        for wave in split_waves(sizes, limits.max_wave, limits.admission.max_tokens)
    ]
    for part in parts:
        limits.admission.check(len(part.requests), part.num_tokens, None)

    def finish(gathered: Sequence[Gathered], moments: Moments) -> bytes:
        return msgspec.json.encode(answer(choices))

    return LineWork(parts, finish)
