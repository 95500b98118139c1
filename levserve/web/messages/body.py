"""The bodies of /v1/messages and /v1/messages/count_tokens, field by field.

Fields that are not declared here are accepted and not read, among them `cache_control`, `context_management`,
`service_tier` and `speed`: they tell Anthropic how to bill, route or keep what is sent, and change no answer
here. A known field that asks for something this server cannot do is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from levserve.errors import BadRequest
from levserve.request.decode import missing, refuse_unsupported, require_choice
from levserve.request.schema import MAX_STOPS, Count, ModelName, Share, StopString
from levserve.request.tool_fields import check_name
from levserve.web.messages.blocks import InputMessage, TextBlock, check_results

CUSTOM = "custom"
"""The type of a tool that the client runs and describes itself; also that of a tool without a type."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")
REFUSED: Mapping[str, tuple[object, ...]] = {
    "compaction": (),
    "container": (),
    "fallbacks": ([],),
    "mcp_servers": ([],),
    "thread": (),
}
"""Fields that this server cannot honour, each with the values that ask for nothing."""


class InputTool(Struct, frozen=True):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None

    def check(self, path: str) -> None:
        if self.type not in (None, CUSTOM):
            raise BadRequest(
                f"'{path}' is a tool of type '{(self.type or '')[:64]}', which this server does not have; "
                "it takes tools with a name and an 'input_schema'.",
                param=f"{path}.type",
            )
        check_name(self.name, f"{path}.name")
        if self.input_schema is None:
            raise missing(f"{path}.input_schema")
        if self.input_schema.get("type") != "object":
            raise BadRequest(
                f"'{path}.input_schema' must have the type 'object'.", param=f"{path}.input_schema.type"
            )


class ToolChoice(Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def check(self) -> None:
        require_choice(self.type, ("auto", "any", "tool", "none"), "tool_choice.type")
        if self.type == "tool" and self.name is None:
            raise missing("tool_choice.name")


class ThinkingConfig(Struct, frozen=True):
    type: str
    budget_tokens: Count | None = None
    display: str | None = None

    def check(self, max_tokens: int | None) -> None:
        require_choice(self.type, ("enabled", "disabled", "adaptive"), "thinking.type")
        if self.display is not None:
            require_choice(self.display, ("summarized", "omitted"), "thinking.display")
        if self.type == "enabled" and self.budget_tokens is None:
            raise missing("thinking.budget_tokens")
        if max_tokens is not None and (self.budget_tokens or 0) >= max_tokens:
            raise BadRequest(
                f"'thinking.budget_tokens' is {self.budget_tokens}, but must be below 'max_tokens', "
                f"which is {max_tokens}.",
                param="thinking.budget_tokens",
            )


class OutputFormat(Struct, frozen=True):
    type: str
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptBody(Struct, frozen=True, kw_only=True):
    """What the prompt is made of; the body of /v1/messages/count_tokens."""

    model: ModelName
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    compaction: Any = None
    container: Any = None
    fallbacks: Any = None
    mcp_servers: Any = None
    thread: Any = None

    def __post_init__(self) -> None:
        refuse_unsupported(self, REFUSED)
        for number, message in enumerate(self.messages):
            message.check(f"messages[{number}]")
        check_results(self.messages)
        for number, tool in enumerate(self.tools or ()):
            tool.check(f"tools[{number}]")
        if self.tool_choice is not None:
            self.tool_choice.check()
        if self.thinking is not None:
            self.thinking.check(getattr(self, "max_tokens", None))
        if self.output_config is not None and self.output_config.effort is not None:
            require_choice(self.output_config.effort, EFFORTS, "output_config.effort")
        if self.wanted_format is not None:
            place = "output_format" if self.output_format else "output_config.format"
            require_choice(self.wanted_format.type, ("json_schema",), f"{place}.type")

    @property
    def wanted_format(self) -> OutputFormat | None:
        """The format that the answer is held to; `output_format` is its older place."""
        return self.output_format or (self.output_config.format if self.output_config else None)

    @property
    def hides_thoughts(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"


class MessageBody(PromptBody, frozen=True, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Share | None = None
    metadata: dict[str, Any] | None = None
