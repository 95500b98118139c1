"""The tokenizer over HTTP: /tokenize, /detokenize, /tokenizer_info and /apply_template.

The shapes are vLLM's, which lm-evaluation-harness expects at the root; /v1 has them too. The views run on
HTTP threads and do not use the device. A long text takes seconds, so these requests take places in the queue
like all others.
"""

from __future__ import annotations

from typing import Annotated, Any

from flask import Blueprint, Response, request
from msgspec import Meta, Struct

from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest
from levserve.request.chat_message import Message
from levserve.request.decode import missing, unsupported
from levserve.request.submission import check_token_ids
from levserve.request.tool_fields import FunctionTool, find_tools
from levserve.request.tool_use import make_conversation
from levserve.text.chat import Options, render_chat, render_text, template_of
from levserve.text.tokenizer import Tokenizer
from levserve.text.tools.request import ToolRequest
from levserve.web.call import Calls, header_timeout
from levserve.web.json_body import json_response


class ModelBody(Struct, frozen=True, kw_only=True):
    """A body that need not name a model."""

    model: str | None = None


class ConversationBody(ModelBody, frozen=True, kw_only=True):
    """The body of /apply_template: messages as /v1/chat/completions takes them."""

    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    tools: list[FunctionTool] | None = None

    def __post_init__(self) -> None:
        if self.chat_template:
            raise unsupported("chat_template")
        self.find_tools()
        for number, message in enumerate(self.messages or ()):
            message.check(f"messages[{number}]")
        if self.add_generation_prompt and self.continue_final_message:
            raise BadRequest(
                "'add_generation_prompt' and 'continue_final_message' exclude each other.",
                param="continue_final_message",
            )

    def find_tools(self) -> ToolRequest | None:
        return find_tools(self.tools, None, None)

    def make_conversation(self, model: ServedModel) -> tuple[list[dict[str, Any]], Options]:
        if self.messages is None:
            raise missing("messages")
        made = make_conversation(self.messages, self.find_tools(), self.chat_template_kwargs, model)
        return made.messages, {
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": self.continue_final_message is True,
            "template_kwargs": made.template_kwargs,
        }


class TokenizeBody(ConversationBody, frozen=True, kw_only=True):
    """The body of /tokenize: a text or a conversation."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.messages is not None:
            raise BadRequest("'prompt' and 'messages' exclude each other.", param="messages")
        if self.prompt is None and self.messages is None:
            raise missing("prompt")
        if self.messages is not None and self.add_special_tokens:
            raise unsupported("add_special_tokens")  # the template writes them itself


class DetokenizeBody(ModelBody, frozen=True, kw_only=True):
    tokens: list[int]
    skip_special_tokens: bool | None = None


class Tokenized(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(Struct, frozen=True):
    prompt: str


class TokenizerInfo(Struct, frozen=True):
    """The fields of a tokenizer_config.json, as vLLM answers them, and all token ids that end a text."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    eos_token_ids: list[int]
    special_tokens: tuple[str, ...]
    chat_template: str | None


def tokens_routes(calls: Calls) -> Blueprint:
    routes = Blueprint("tokens", __name__)

    def tokenize() -> Response:
        with calls.begin() as call:
            body = call.read(TokenizeBody)
            model = call.get_model(body.model)
            if body.prompt is None:
                messages, options = body.make_conversation(model)
                tokens = render_chat(model.tokenizer, messages, **options)
            else:
                adds_special = body.add_special_tokens is not False
                tokens = model.tokenizer.encode(body.prompt, add_special_tokens=adds_special)
            names = [_name(token, model.tokenizer) for token in tokens] if body.return_token_strs else None
            return json_response(Tokenized(len(tokens), model.max_seq_len, tokens, names))

    def detokenize() -> Response:
        with calls.begin() as call:
            body = call.read(DetokenizeBody)
            tokenizer = call.get_model(body.model).tokenizer
            check_token_ids("tokens", body.tokens, tokenizer)
            skips = body.skip_special_tokens is True
            return json_response(Prompt(tokenizer.decode(body.tokens, skip_special_tokens=skips)))

    def apply_template() -> Response:
        with calls.begin() as call:
            body = call.read(ConversationBody)
            model = call.get_model(body.model)
            messages, options = body.make_conversation(model)
            return json_response(Prompt(render_text(model.tokenizer, messages, **options)))

    def show_tokenizer() -> Response:
        """Needs no place in the queue: nothing here takes long."""
        calls.engine.require_loaded()
        with calls.begin() as call:
            call.set_deadline(header_timeout())
            return json_response(_describe(call.get_model(request.args.get("model"))))

    for root in ("", "/v1"):
        routes.add_url_rule(f"{root}/tokenize", view_func=tokenize, methods=["POST"])
        routes.add_url_rule(f"{root}/detokenize", view_func=detokenize, methods=["POST"])
        routes.add_url_rule(f"{root}/apply_template", view_func=apply_template, methods=["POST"])
        routes.add_url_rule(f"{root}/tokenizer_info", view_func=show_tokenizer)
    return routes


def _describe(model: ServedModel) -> TokenizerInfo:
    tokenizer = model.tokenizer
    eos_ids = sorted(tokenizer.eos_ids)
    # Some models name the token that ends a text by its id alone; clients ask for its string.
    eos_token = tokenizer.eos_token or (_name(eos_ids[0], tokenizer) if eos_ids else None)
    return TokenizerInfo(
        "PreTrainedTokenizerFast",
        model.max_seq_len,
        tokenizer.vocab_size,
        tokenizer.bos_token,
        eos_token,
        tokenizer.pad_token,
        eos_ids,
        tokenizer.special_tokens,
        template_of(tokenizer),
    )


def _name(token: int, tokenizer: Tokenizer) -> str:
    """The token as its vocabulary spells it; a model may have more ids than its vocabulary has names."""
    return tokenizer.backend.id_to_token(token) or ""
