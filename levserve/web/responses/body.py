"""The body of /v1/responses, field by field, and the chat that it is run as.

Fields that are not declared here are accepted and ignored, among them service_tier, prompt_cache_key,
safety_identifier, max_tool_calls and client_metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, defstruct

from levserve.errors import BadRequest
from levserve.request.constraint import FORMATS, NamedSchema, ResponseFormat
from levserve.request.decode import missing, refuse_unsupported, require_choice
from levserve.request.schema import (
    MAX_STOPS,
    ChatBody,
    Count,
    Metadata,
    ModelName,
    NumTop,
    Penalty,
    Priority,
    Seconds,
    Share,
    StopString,
    StreamOptions,
)
from levserve.request.tool_fields import Function, FunctionTool
from levserve.web.field_names import FieldNames
from levserve.web.responses.input_items import InputItem
from levserve.web.responses.messages import make_messages

LOGPROBS = "message.output_text.logprobs"
MAX_DEPTH = 200
TRUNCATIONS = ("disabled", "auto")
RESPONSE_NAMES = FieldNames(
    (r"messages(\[\d+\].*)?", "input"),
    (r"max(_completion)?_tokens", "max_output_tokens"),
    (r"response_format(\.json_schema)?(?P<rest>.*)", r"text.format\g<rest>"),
    (r"(?P<tool>tools\[\d+\])\.function(?P<rest>.*)", r"\g<tool>\g<rest>"),
    (r"reasoning_effort", "reasoning.effort"),
)

# Known fields that this server cannot honour, each with the values that ask for nothing.
UNSUPPORTED_IN_RESPONSES: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "prompt": (),
}

if TYPE_CHECKING:
    RefusedInResponses = Struct
else:  # the table declares the fields, so that each is named once
    RefusedInResponses = defstruct(
        "RefusedInResponses",
        [(name, Any, None) for name in UNSUPPORTED_IN_RESPONSES],
        frozen=True,
        kw_only=True,
    )


class TextFormat(Struct, frozen=True, omit_defaults=True):
    type: str
    name: str | None = None
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseTool(Struct, frozen=True, omit_defaults=True):
    """A function that the model may call."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Reasoning(Struct, frozen=True):
    """`summary` is accepted and has no effect: the thoughts themselves are shown."""

    effort: str | None = None
    summary: str | None = None


class ResponseChat(ChatBody, frozen=True, kw_only=True):
    """The chat of a response. Coding tools ask every model for an effort, whether or not it thinks."""

    may_lack_thoughts = True


class ResponseBody(RefusedInResponses, frozen=True, kw_only=True):
    model: ModelName
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    truncation: str | None = None
    top_logprobs: NumTop | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    user: str | None = None
    timeout: Seconds | None = None

    # OpenAI's endpoint lacks these; clients of other servers send them.
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        refuse_unsupported(self, UNSUPPORTED_IN_RESPONSES)
        if self.input is None and self.previous_response_id is None:
            raise missing("input")
        require_choice(self.truncation or TRUNCATIONS[0], TRUNCATIONS, "truncation")
        if self.text is not None and self.text.format is not None:
            _check_format(self.text.format)
        for number, tool in enumerate(self.tools or ()):
            require_choice(tool.type, ("function",), f"tools[{number}].type")
            if tool.name is None:
                raise missing(f"tools[{number}].name")
            _check_depth(tool.parameters, f"tools[{number}].parameters")
        _check_depth(self.tool_choice, "tool_choice")

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def to_chat(self, items: Sequence[InputItem]) -> ChatBody:
        """The chat whose answer is the response, with the items of its whole history; raises `BadRequest`."""
        messages = make_messages(self.instructions, items)
        if not messages:
            raise BadRequest("'input' has no message.", param="input", code="empty_array")
        with RESPONSE_NAMES.in_errors():
            return ResponseChat(
                model=self.model,
                messages=messages,
                stream=self.stream,
                stream_options=self.stream_options,
                max_completion_tokens=self.max_output_tokens,
                truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
                temperature=self.temperature,
                top_p=self.top_p,
                logprobs=self.wants_logprobs,
                top_logprobs=self.top_logprobs if self.wants_logprobs else None,
                response_format=_chat_format(self.text),
                tools=_chat_tools(self.tools or ()),
                tool_choice=_chat_choice(self.tool_choice),
                parallel_tool_calls=self.parallel_tool_calls,
                reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
                timeout=self.timeout,
                seed=self.seed,
                stop=self.stop,
                top_k=self.top_k,
                min_p=self.min_p,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                chat_template_kwargs=self.chat_template_kwargs,
                thinking_token_budget=self.thinking_token_budget,
                priority=self.priority,
            )


def _check_format(asked: TextFormat) -> None:
    require_choice(asked.type, FORMATS, "text.format.type")
    if asked.type == "json_schema":
        if asked.schema is None:
            raise missing("text.format.schema")
        if asked.name is None:
            raise missing("text.format.name")
    _check_depth(asked.schema, "text.format.schema")


def _check_depth(value: object, param: str) -> None:
    """Refuses nesting too deep for the response to repeat it: msgspec fails at Python's recursion limit."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level = inner
    raise BadRequest(f"'{param}' is nested more than {MAX_DEPTH - 1} levels deep.", param=param)


def _chat_format(text: TextConfig | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    asked = text.format
    if asked.type != "json_schema":
        return ResponseFormat(asked.type)
    return ResponseFormat(asked.type, NamedSchema(asked.schema, asked.name, asked.description, asked.strict))


def _chat_tools(tools: Sequence[ResponseTool]) -> list[FunctionTool] | None:
    found = []
    for tool in tools:
        function = Function(tool.name or "", tool.description, tool.parameters, tool.strict)
        found.append(FunctionTool(tool.type, function))
    return found or None


def _chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The choice in the form of a chat, which has function names one level deeper."""
    match choice:
        case {"type": "function", "name": str(name)}:
            return _nested(name)
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": _allowed(tools)}}
        case {"type": "function"}:
            raise missing("tool_choice.name")
        case {"type": "allowed_tools", **rest}:
            raise missing("tool_choice.tools" if "mode" in rest else "tool_choice.mode")
        case {"type": str(kind)}:
            require_choice(kind, ("function", "allowed_tools"), "tool_choice.type")
    return choice


def _allowed(tools: Sequence[object]) -> list[object]:
    allowed: list[object] = []
    for tool in tools:
        match tool:
            case {"type": "function", "name": str(name)}:
                allowed.append(_nested(name))
            case _:
                allowed.append(tool)
    return allowed


def _nested(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
