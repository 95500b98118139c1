"""The fields of a request as keyword arguments, with the server's checks and defaults."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from levserve.api.items import BYTES
from levserve.errors import BadRequest
from levserve.request.decode import Body, decode, require_choice
from levserve.request.pooling import POOLINGS
from levserve.request.schema import CompletionBody, Priority, PromptLimit, Seconds, check_prompt_limit

NOT_HERE = {"model", "prompt", "messages", "stream", "stream_options", "timings", "user", "return_token_ids"}
"""Fields of a body that are not keyword arguments: the call itself implies them, or always does them."""


class Fields(TypedDict, total=False):
    """What `generate` and `chat` share. The documentation of /v1/completions explains each field."""

    max_tokens: int
    n: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    min_tokens: int
    skip_special_tokens: bool
    prompt_logprobs: int
    logprobs_mode: str
    truncate_prompt_tokens: int
    timeout: float
    priority: int
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]
    guided_json: Any
    guided_regex: str
    guided_choice: Sequence[str]
    guided_grammar: str
    guided_whitespace_pattern: str
    grammar: str
    json_schema: Any
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]


class TextFields(Fields, total=False):
    """The fields of `generate`."""

    logprobs: int
    """How many alternatives to return for each token; 0 for the chosen tokens alone."""
    suffix: str
    echo: bool
    best_of: int
    add_special_tokens: bool


class ChatFields(Fields, total=False):
    """The fields of `chat`."""

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str
    thinking_token_budget: int


class PromptsBody(CompletionBody, frozen=True, kw_only=True):
    """The body of one of the prompts of `generate`; its errors name that argument."""

    prompt_param = "prompts"


class ScoreFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `score`, checked."""

    truncate_prompt_tokens: PromptLimit | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None

    def __post_init__(self) -> None:
        check_prompt_limit(self.truncate_prompt_tokens)


class EmbedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `embed`, checked."""

    pooling: str | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None:
            require_choice(self.pooling, POOLINGS, "pooling")


def make_body(kind: type[Body], own: Mapping[str, object], given: Mapping[str, object]) -> Body:
    """The body that a client would have sent, read as the server reads it.

    Raises `BadRequest` for a wrong value, and `TypeError` for a name that no field has.
    """
    known = set(kind.__struct_fields__) - NOT_HERE
    for name, value in given.items():
        if name not in known:
            similar = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise TypeError(f"unknown keyword argument {name!r}{hint}")
        plain = value.tolist() if hasattr(value, "dtype") else value  # type: ignore[attr-defined]
        if isinstance(plain, float) and not math.isfinite(plain):  # JSON would have null, the default
            raise BadRequest(f"Invalid value for '{name}': expected a finite number.", param=name)
    fields = {**own, **given}
    try:
        for name, value in fields.items():
            _refuse_bytes(value, name)
        data = msgspec.json.encode(fields, enc_hook=_plain)
    except RecursionError:
        raise BadRequest("The request is nested too deeply.") from None
    except (TypeError, UnicodeEncodeError) as error:
        raise BadRequest(f"The request cannot be read: {error}.") from None
    return decode(data, kind)


def _refuse_bytes(value: object, path: str) -> None:
    """JSON would have them in base64, as a text."""
    if isinstance(value, BYTES):
        raise BadRequest(
            f"Invalid type for '{path}': {type(value).__name__} is not accepted; decode it to a text.",
            param=path,
            code="invalid_type",
        )
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_bytes(item, f"{path}.{name}")
    elif isinstance(value, (list, tuple)) and not set(map(type, value)) <= {int, float, str}:
        for index, item in enumerate(value):
            _refuse_bytes(item, f"{path}[{index}]")


def _plain(value: Any) -> Any:
    """NumPy's scalars and arrays, and other sequences and mappings, as types that JSON has."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (Sequence, range)):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")
