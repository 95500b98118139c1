"""Plain endpoints for scripts: /generate answers prompts with a list of texts, /generate_stream with events.

Both run completions, with their own field names and defaults. The views run on HTTP threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from flask import Blueprint, Response
from msgspec import UNSET, Meta, Struct, UnsetType

from levserve.answers.answer import ChatChunkChoice, TextAnswer, TextChoice, Timings, Usage
from levserve.errors import BadRequest
from levserve.request.constraint import ConstraintFields
from levserve.request.schema import (
    MAX_STOPS,
    CompletionBody,
    Count,
    Priority,
    PromptLimit,
    Seconds,
    Share,
    StopString,
)
from levserve.schedule.request import FinishReason
from levserve.web.call import Calls
from levserve.web.events import ChunkStream
from levserve.web.json_body import json_response
from levserve.web.sse import stream_response


class PlainCompletion(CompletionBody, frozen=True, kw_only=True):
    """A completion whose errors name the fields of `GenerateBody`."""

    prompt_param = "prompts"
    choices_param = "prompts"
    default_max_tokens = 128
    default_temperature = 0.7


class GenerateBody(ConstraintFields, frozen=True, kw_only=True):
    """The body of both endpoints. A null field counts as left out; `prompts` may not be null."""

    prompts: Annotated[list[str], Meta(min_length=1)]
    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    stream: bool | None = None
    timeout: Seconds | None = None
    priority: Priority | None = None

    def check_stream(self, *, wanted: bool) -> None:
        """Refuses a `stream` field that contradicts the path."""
        if self.stream not in (None, wanted):
            words = "always streams; ask /generate" if wanted else "never streams; ask /generate_stream"
            raise BadRequest(f"This path {words} instead.", param="stream")

    def to_completion(self) -> CompletionBody:
        return PlainCompletion(
            model=self.model or "",
            prompt=list(self.prompts),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority,
            **{name: getattr(self, name) for name in ConstraintFields.__struct_fields__},
        )


class Generated(Struct, frozen=True):
    """One text and one finish reason per prompt, in the prompts' order."""

    completions: list[str]
    finish_reasons: list[FinishReason | None]
    usage: Usage
    warnings: Sequence[str] | UnsetType = UNSET


class GeneratedChunk(Struct, frozen=True):
    index: int
    text: str
    finish_reason: FinishReason | UnsetType = UNSET
    warnings: Sequence[str] | UnsetType = UNSET


class GenerateAnswer(TextAnswer):
    """The events of /generate_stream."""

    def chunk(
        self,
        choices: Sequence[TextChoice | ChatChunkChoice],
        usage: Usage | UnsetType | None,
        timings: Timings | UnsetType = UNSET,
        *,
        is_opening: bool = False,
    ) -> bytes:
        (choice,) = choices
        assert isinstance(choice, TextChoice)
        finish = choice.finish_reason or UNSET
        warnings = self._warnings if finish else UNSET
        return msgspec.json.encode(GeneratedChunk(choice.index, choice.text, finish, warnings))


def native_routes(calls: Calls) -> Blueprint:
    routes = Blueprint("native", __name__)

    @routes.post("/generate")
    def generate() -> Response:
        with calls.begin() as call:
            body = call.read(GenerateBody)
            body.check_stream(wanted=False)
            run = call.start(body.to_completion(), call.get_model(body.model))
            deltas = run.collect()
            return json_response(
                Generated(
                    [delta.text for delta in deltas],
                    [delta.finish for delta in deltas],
                    run.usage(),
                    run.warnings or UNSET,
                )
            )

    @routes.post("/generate_stream")
    def generate_stream() -> Response:
        with calls.begin() as call:
            body = call.read(GenerateBody)
            body.check_stream(wanted=True)
            return stream_response(call, body.to_completion(), ChunkStream(GenerateAnswer))

    return routes
