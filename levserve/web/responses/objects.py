"""The response object of /v1/responses and the items of its output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from msgspec import UNSET, Struct, UnsetType, structs

from levserve.answers.logprobs import ChosenToken
from levserve.errors import ServeError
from levserve.web.responses.body import (
    RESPONSE_NAMES,
    TRUNCATIONS,
    Reasoning,
    ResponseBody,
    ResponseTool,
    TextConfig,
    TextFormat,
)
from levserve.web.responses.input_items import make_id
from levserve.web.run import Run

FAILURE_CODES = {429: "rate_limit_exceeded"}
"""OpenAI's codes of a failed response, by the status that the error would have had."""
PLAIN_TEXT = TextFormat("text")


class Status(StrEnum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChosenToken] = []


class MessageItem(Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: Status
    content: list[OutputText]
    role: str = "assistant"


class CallItem(Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""
    status: Status


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = []


OutputItem = MessageItem | CallItem | ReasoningItem


class InputTokens(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokens(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class ResponseObject(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = Status.IN_PROGRESS
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: Sequence[OutputItem] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    warnings: Sequence[str] | UnsetType = UNSET
    """Where the server did not do what the client asked."""


def draft_response(body: ResponseBody, *, is_stored: bool) -> ResponseObject:
    """The response to this body before it has begun."""
    text = body.text or TextConfig()
    return ResponseObject(
        id=make_id("resp_"),
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning or Reasoning(),
        store=is_stored,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=structs.replace(text, format=text.format or PLAIN_TEXT),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation=body.truncation or TRUNCATIONS[0],
        user=body.user,
    )


def begin_response(draft: ResponseObject, run: Run, is_parallel: bool | None) -> ResponseObject:
    """The draft with what the run's policy changed."""
    temperature = run.body.temperature
    return structs.replace(
        draft,
        model=run.model_name or run.model.name,
        parallel_tool_calls=(
            run.model.tools.max_calls(is_parallel) > 1 if draft.tools else draft.parallel_tool_calls
        ),
        max_output_tokens=run.body.max_length,
        temperature=draft.temperature if temperature is None else temperature,
        warnings=[RESPONSE_NAMES.rename_quoted(warning) for warning in run.warnings] or UNSET,
    )


def fail_response(
    begun: ResponseObject, error: ServeError, output: Sequence[OutputItem] = ()
) -> ResponseObject:
    code = FAILURE_CODES.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
    return structs.replace(
        begun, status=Status.FAILED, output=output, error=ResponseError(code, error.message)
    )


def count_usage(run: Run) -> ResponseUsage:
    usage = run.usage()
    num_thought_tokens = sum(choice.num_thought_tokens for choice in run.choices)
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokens(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokens(num_thought_tokens),
        usage.total_tokens,
    )
