"""Renders a conversation with the model's chat template and encodes it.

Called on HTTP threads. The template is the model's own and runs in a sandbox; what a client wrote in a
message never becomes a control token (see `_hide`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypedDict, Unpack

from jinja2 import TemplateError

from levserve.errors import BadRequest
from levserve.text.template import render_template
from levserve.text.tokenizer import Tokenizer, is_unicode

# For a model without a template whose vocabulary has Llama 3's header tokens.
_LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_LLAMA3_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

NO_TEMPLATE = (
    "This model has no chat template, so it cannot answer messages: send a prompt to /v1/completions, "
    "or start the server with --chat-template FILE."
)

# A hidden special token is its number between two surrogates: text cannot hold those, so a client cannot
# write one.
_OPEN, _CLOSE = "\ud800", "\udfff"
_HIDDEN = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")

# What a template may do to a client's messages short of a syntax error: `raise_exception`, undefined names,
# None + str.
_TEMPLATE_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_OWN_ARGUMENTS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "messages",
        "return_assistant_tokens_mask",
    )
)


class Options(TypedDict, total=False):
    """How to render: with `continue_final_message` the last message is left open for the model to go on
    with."""

    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any] | None


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Unpack[Options]
) -> list[int]:
    """Tokens of a conversation, as the template writes it: nothing is added, so there is no second BOS."""
    return _encode(tokenizer, _render_hidden(tokenizer, messages, **options))


def render_text(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Unpack[Options]
) -> str:
    """The conversation as text for people: control tokens and look-alikes that a client wrote cannot be told
    apart in it."""
    return _reveal(_render_hidden(tokenizer, messages, **options), tokenizer.special_tokens)


def template_of(tokenizer: Tokenizer) -> str | None:
    """The model's own template; else Llama 3's for a vocabulary that has its tokens; else none."""
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    return _LLAMA3_TEMPLATE if set(_LLAMA3_TOKENS) <= set(tokenizer.special_tokens) else None


def check_template(tokenizer: Tokenizer) -> None:
    """Compiles the template: a broken one stops the start, and the first request does not wait for it."""
    with suppress(BadRequest):  # a template may refuse this conversation
        render_chat(tokenizer, [{"role": "user", "content": "Hello"}])


def _render_hidden(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    if not messages:
        raise BadRequest("A conversation needs at least one message.", param="messages")
    template = template_of(tokenizer)
    if template is None:
        raise BadRequest(NO_TEMPLATE, param="messages", code="no_chat_template")
    conversation = [_plain_message(number, message, template) for number, message in enumerate(messages)]
    try:
        return _render(
            template,
            _hide(conversation, tokenizer.special_tokens),
            {**_special_names(tokenizer), **_hide(_checked(template_kwargs or {}), tokenizer.special_tokens)},
            tokenizer.special_tokens,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        )
    except RecursionError:
        raise BadRequest(
            "'chat_template_kwargs' is nested too deeply.", param="chat_template_kwargs"
        ) from None


def _plain_message(number: int, message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message as templates expect it: the content a string, the role one that the template knows."""
    role = message.get("role")
    if role == "developer" and "developer" not in template:
        role = "system"
    return {**message, "role": role, "content": _plain_content(number, role, message.get("content"))}


def _plain_content(number: int, role: Any, content: Any) -> str:
    where = f"messages[{number}].content"
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where} must be a string or a list of text parts.", param=where)
    return "".join(_part_text(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise BadRequest(
            f"This model reads text only: {where}.type must be 'text', not {kind!r}.", param=f"{where}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"{where}.text must be a string.", param=f"{where}.text")
    return text


def _special_names(tokenizer: Tokenizer) -> dict[str, str]:
    names = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
    }
    return {name: token for name, token in names.items() if token is not None}


def _checked(template_kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    if taken := _OWN_ARGUMENTS & template_kwargs.keys():
        raise BadRequest(
            f"The template argument {min(taken)} is set by the server.", param="chat_template_kwargs"
        )
    return template_kwargs


def _render(
    template: str,
    conversation: list[dict[str, Any]],
    names: Mapping[str, Any],
    specials: Sequence[str],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    try:
        return render_template(
            template,
            conversation,
            names,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except _TEMPLATE_FAILURES as error:
        raise BadRequest(
            f"The chat template refuses these messages: {_reveal(str(error), specials)}", param="messages"
        ) from error


def _hide(value: Any, specials: Sequence[str]) -> Any:
    """Hides the strings of special tokens in everything a client wrote, so that only the template's own
    remain.

    A value without such strings stays as it is, so its rendering is the ordinary one; the replacement passes
    through `trim` and its like as the string would.
    """
    if isinstance(value, str):
        if not is_unicode(value):
            raise BadRequest(
                "A message holds half of a surrogate pair, which is not a character.", param="messages"
            )
        for number, special in enumerate(specials):
            value = value.replace(special, f"{_OPEN}{number}{_CLOSE}")
        return value
    if isinstance(value, Mapping):
        return {key: _hide(item, specials) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_hide(item, specials) for item in value]
    return value


def _reveal(text: str, specials: Sequence[str]) -> str:
    return _HIDDEN.sub(lambda match: specials[int(match[1])], text)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a rendering; stretches between special tokens that contain a hidden one are encoded as plain
    text."""
    if _OPEN not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    written = [re.escape(special) for special in tokenizer.special_tokens if special in text]
    tokens: list[int] = []
    ordinary = ""
    for piece in re.split(f"({'|'.join(written)})", text) if written else [text]:
        if _OPEN not in piece:
            ordinary += piece
            continue
        tokens += tokenizer.encode(ordinary, add_special_tokens=False)
        tokens += tokenizer.encode_plain(_reveal(piece, tokenizer.special_tokens))
        ordinary = ""
    return tokens + tokenizer.encode(ordinary, add_special_tokens=False)
