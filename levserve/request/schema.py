"""The bodies of OpenAI's generating endpoints, field by field.

Decoding checks everything that does not depend on the model; `submission.py` checks the rest (vocabulary,
context). Any field may be null, which is the same as leaving it out. Fields that are not declared here are
accepted and ignored, among them metadata, store, service_tier, safety_identifier, prompt_cache_key,
prompt_cache_options, verbosity, moderation and prediction. A known field that this server cannot honour is
refused by name if it asks for something.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta, Struct, defstruct

from levserve.errors import BadRequest
from levserve.request.chat_message import Message
from levserve.request.constraint import ConstraintFields
from levserve.request.decode import refuse_unsupported, require_choice, unsupported
from levserve.request.texts import Texts, check_texts, split_texts
from levserve.request.tool_fields import (
    Function,
    FunctionTool,
    find_functions,
    find_tools,
)
from levserve.schedule.request import LogprobsMode
from levserve.text.tools.request import ToolRequest

MAX_STOPS = 16
MAX_LOGPROBS = 20  # the sampler's widest top list

ModelName = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]  # beyond any context; the bound keeps sums inside an int32
NumTop = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
NumChoices = Annotated[int, Meta(ge=1, le=128)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# Each choice prepares its own stop strings, in time linear in their length.
StopString = Annotated[str, Meta(min_length=1, max_length=1000)]
PromptLimit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""For `truncate_prompt_tokens`; `check_prompt_limit` refuses 0."""
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
"""With OpenAI's bounds."""
Priority = int
"""VLLM's: a smaller number is served first, and 0 is the default."""

# Known fields that this server cannot honour, each with the values that ask for nothing: OpenAI's, and those
# of vLLM, SGLang and llama.cpp that would change the answer.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "cache_salt": ("",),
    "chat_template": (),
    "custom_logit_processor": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": ("",),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "mirostat": (0,),
    "modalities": (["text"], []),
    "n_predict": (-1,),
    "prompt_embeds": ("", []),
    "regex": ("",),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "stop_regex": ("", []),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
    "xtc_probability": (0,),
}
UNSUPPORTED_IN_CHAT: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),  # the template writes them itself
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
UNSUPPORTED_IN_COMPLETIONS: Mapping[str, tuple[object, ...]] = {
    "function_call": ("none", "auto"),
    "functions": ([],),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}

if TYPE_CHECKING:
    Refused = ConstraintFields
else:  # the table declares the fields, so that each is named once
    Refused = defstruct(
        "Refused",
        [(name, Any, None) for name in UNSUPPORTED],
        bases=(ConstraintFields,),
        frozen=True,
        kw_only=True,
    )


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """VLLM's: every chunk has the token counts so far; only with `include_usage`."""
    include_obfuscation: bool | None = None


class GenerationBody(Refused, frozen=True, kw_only=True):
    """The fields of both endpoints: how many tokens, how they are sampled, where they stop."""

    prompt_param: ClassVar[str]
    """The field that holds the prompt, for errors about it."""
    default_max_tokens: ClassVar[int | None] = None
    """The most tokens to generate if no field says it; None for as many as the context holds."""
    default_temperature: ClassVar[float] = 1.0
    cuts_limit: ClassVar[bool] = False
    """Whether a limit that exceeds the context is lowered to fit instead of refused."""
    may_lack_thoughts: ClassVar[bool] = False
    """Whether a model that does not think may answer a request for thoughts instead of refusing it."""

    model: ModelName
    max_tokens: Count | None = None
    n: NumChoices | None = None
    prompt_logprobs: NumTop | None = None
    logprobs_mode: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    timings: bool | None = None
    return_token_ids: bool | None = None
    timeout: Seconds | None = None
    priority: Priority | None = None
    user: str | None = None

    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=300)] | None
    ) = None

    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    skip_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        refuse_unsupported(self, UNSUPPORTED)
        check_prompt_limit(self.truncate_prompt_tokens)
        if self.logprobs_mode is not None:
            require_choice(self.logprobs_mode, tuple(LogprobsMode), "logprobs_mode")
        self.find_grammar()
        if self.stream_options and not self.stream:
            raise BadRequest(
                "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
            )
        if self.stream_options and self.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest(
                "'prompt_logprobs' is not allowed when 'stream' is true.", param="prompt_logprobs"
            )

    @property
    def max_length(self) -> int | None:
        """The most tokens to generate; None for as many as the context holds."""
        given = self.limit_field
        return self.default_max_tokens if given is None else getattr(self, given)

    @property
    def limit_field(self) -> str | None:
        """The field that says how many tokens to generate at most, if one does."""
        return None if self.max_tokens is None else "max_tokens"

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    @property
    def num_sequences(self) -> int:
        """Sequences that run for each prompt; the choices are the best of them."""
        return self.num_choices

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer's text continues the prompt's: then its first token keeps its space."""
        return False

    @property
    def calls_functions(self) -> bool:
        """Whether calls of tools go to a client that knows only the older `functions`."""
        return False

    @property
    def choices_param(self) -> str:
        """The field that says how many sequences run, for errors about their number."""
        if self.num_sequences == 1:
            return self.prompt_param
        return "n" if self.num_sequences == self.num_choices else "best_of"

    @property
    def num_logprobs(self) -> int | None:
        """None shows no log-probabilities; n shows each token's and those of the n likeliest in its place."""
        return None

    @property
    def num_computed_logprobs(self) -> int | None:
        """What the device computes: all that is shown, and what is needed to rank the sequences."""
        for_ranking = 0 if self.num_sequences > self.num_choices else None
        counts = (self.num_logprobs, self.prompt_logprobs, for_ranking)
        return max((count for count in counts if count is not None), default=None)

    @property
    def shows_prompt(self) -> bool:
        return False

    @property
    def text_after(self) -> str:
        """The text that follows the one to be written; empty if none is given."""
        return ""

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def wants_running_usage(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """The body of /v1/completions."""

    prompt_param = "prompt"
    default_max_tokens = 16

    prompt: Texts
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: NumTop | None = None
    suffix: str | None = None
    """What follows the text to write; the prompt is what precedes it."""
    echo: bool | None = None
    best_of: NumChoices | None = None
    add_special_tokens: bool | None = None
    function_call: Any = None
    functions: Any = None
    reasoning_effort: Any = None
    thinking_token_budget: Any = None
    tool_choice: Any = None
    tools: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unsupported(self, UNSUPPORTED_IN_COMPLETIONS, where="in completions")
        check_texts(self.prompt, "prompt")
        for field in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, field):
                raise BadRequest(f"'{field}' is not allowed together with 'suffix'.", param=field)
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("'max_tokens' must be at least 1, or 0 when 'echo' is true.", param="max_tokens")
        if self.best_of is not None and self.best_of < self.num_choices:
            raise BadRequest(
                f"'best_of' is {self.best_of}, but must be at least 'n', which is {self.num_choices}.",
                param="best_of",
            )
        if self.stream and self.num_sequences > self.num_choices:
            raise BadRequest("'best_of' above 'n' is not allowed when 'stream' is true.", param="best_of")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt as text to tokenize or as the tokens themselves."""
        return split_texts(self.prompt)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def continues_prompt(self) -> bool:
        return True

    @property
    def num_sequences(self) -> int:
        return self.best_of or self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def shows_prompt(self) -> bool:
        return self.echo is True

    @property
    def text_after(self) -> str:
        return self.suffix or ""


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    prompt_param = "messages"

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    add_special_tokens: Any = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unsupported(self, UNSUPPORTED_IN_CHAT, where="in chat completions")
        for number, message in enumerate(self.messages):
            message.check(f"messages[{number}]")
        self.find_tools()
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            raise BadRequest(
                "'add_generation_prompt' and 'continue_final_message' exclude each other.",
                param="continue_final_message",
            )

    def find_tools(self) -> ToolRequest | None:
        """What the fields ask for; None without tools. Raises `BadRequest`."""
        if self.tools and self.functions:
            raise BadRequest("'functions' is the older name of 'tools'; send one of them.", param="functions")
        found = find_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        return found or find_functions(self.functions, self.function_call)

    @property
    def limit_field(self) -> str | None:
        return super().limit_field if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def continues_prompt(self) -> bool:
        return self.continue_final_message is True

    @property
    def calls_functions(self) -> bool:
        return bool(self.functions)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def check_prompt_limit(limit: int | None) -> None:
    if limit == 0:
        raise BadRequest(
            "'truncate_prompt_tokens' must be at least 1, or -1 for as many as fit.",
            param="truncate_prompt_tokens",
        )
