"""What the tokenizer does, over HTTP: /tokenize, /detokenize, /tokenizer_info and /apply_template.

The shapes are vLLM's, which lm-evaluation-harness expects at the root; /v1 has them too. Views run on HTTP threads and
need nothing of the device; but a long text takes seconds, so they have places in the queue like everyone.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any, TypeVar

import msgspec
from flask import Blueprint, Response, g, request
from msgspec import Meta, Struct

from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest
from levserve.settings.settings import Settings
from levserve.text.chat import Options, render_chat, render_text, template_of
from levserve.text.tokenizer import Tokenizer
from levserve.web.admit import admit, asked_timeout
from levserve.web.body import read_body
from levserve.web.json_body import decode, unsupported
from levserve.web.run import Runs
from levserve.web.schema import Message
from levserve.web.submission import check_token_ids


class ModelBody(Struct, frozen=True, kw_only=True):
    """A client need not name the model; one that does must name ours."""

    model: str | None = None


class ConversationBody(ModelBody, frozen=True, kw_only=True):
    """The body of /apply_template: messages as /v1/chat/completions takes them."""

    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    tools: Any = None

    def __post_init__(self) -> None:
        for name in ("chat_template", "tools"):
            if getattr(self, name):
                raise unsupported(name)
        for number, message in enumerate(self.messages or ()):
            message.check(f"messages[{number}]")
        if self.add_generation_prompt and self.continue_final_message:
            raise BadRequest(
                "'add_generation_prompt' and 'continue_final_message' exclude each other.",
                param="continue_final_message",
            )

    @property
    def conversation(self) -> list[dict[str, str]]:
        if self.messages is None:
            raise BadRequest(
                "Missing required parameter: 'messages'.", param="messages", code="missing_required_parameter"
            )
        return [message.to_template() for message in self.messages]

    @property
    def options(self) -> Options:
        return {
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": self.continue_final_message is True,
            "template_kwargs": self.chat_template_kwargs,
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
            raise BadRequest(
                "Missing required parameter: 'prompt'.", param="prompt", code="missing_required_parameter"
            )
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
    """As a tokenizer_config.json has it, which is what vLLM answers; the strings of tokens, and their ids where several count."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    eos_token_ids: list[int]
    special_tokens: tuple[str, ...]
    chat_template: str | None


B = TypeVar("B", bound=ModelBody)


class Tokens:
    """The views; shared by all HTTP threads."""

    def __init__(self, engine: Engine, settings: Settings, runs: Runs) -> None:
        self._engine = engine
        self._runs = runs
        self._max_body_bytes = settings.max_body_bytes

    def routes(self) -> Blueprint:
        routes = Blueprint("tokens", __name__)
        for root in ("", "/v1"):
            routes.add_url_rule(f"{root}/tokenize", view_func=self.tokenize, methods=["POST"])
            routes.add_url_rule(f"{root}/detokenize", view_func=self.detokenize, methods=["POST"])
            routes.add_url_rule(f"{root}/apply_template", view_func=self.apply_template, methods=["POST"])
            routes.add_url_rule(f"{root}/tokenizer_info", view_func=self.show_tokenizer)
        return routes

    def tokenize(self) -> Response:
        with ExitStack() as held:
            body, model = self._read(held, TokenizeBody)
            if body.prompt is None:
                tokens = render_chat(model.tokenizer, body.conversation, **body.options)
            else:
                tokens = model.tokenizer.encode(
                    body.prompt, add_special_tokens=body.add_special_tokens is not False
                )
            names = [_name(token, model.tokenizer) for token in tokens] if body.return_token_strs else None
            return _answer(Tokenized(len(tokens), model.max_seq_len, tokens, names))

    def detokenize(self) -> Response:
        with ExitStack() as held:
            body, model = self._read(held, DetokenizeBody)
            check_token_ids("tokens", body.tokens, model.tokenizer)
            return _answer(
                Prompt(
                    model.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens is True)
                )
            )

    def apply_template(self) -> Response:
        with ExitStack() as held:
            body, model = self._read(held, ConversationBody)
            return _answer(Prompt(render_text(model.tokenizer, body.conversation, **body.options)))

    def show_tokenizer(self) -> Response:
        with ExitStack() as held:
            model = self._borrow(request.args.get("model"), held)
        tokenizer = model.tokenizer
        eos_ids = sorted(tokenizer.eos_ids)
        # A model may say by number alone which token ends a text; clients ask for its string.
        eos_token = tokenizer.eos_token or (_name(eos_ids[0], tokenizer) if eos_ids else None)
        return _answer(
            TokenizerInfo(
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
        )

    def _read(self, held: ExitStack, kind: type[B]) -> tuple[B, ServedModel]:
        held.enter_context(admit(self._engine))
        body = decode(read_body(self._max_body_bytes), kind)
        return body, self._borrow(body.model, held)

    def _borrow(self, name: str | None, held: ExitStack) -> ServedModel:
        self._engine.require_loaded()
        return self._runs.borrow(
            name,
            held,
            self._runs.deadline(g.started, asked_timeout()),
            request.environ.get("gunicorn.socket"),
        )


def _name(token: int, tokenizer: Tokenizer) -> str:
    """The token as its vocabulary spells it; a model may have more rows than names."""
    return tokenizer.backend.id_to_token(token) or ""


def _answer(content: Struct) -> Response:
    return Response(msgspec.json.encode(content), content_type="application/json")
