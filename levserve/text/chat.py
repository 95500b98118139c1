"""Renders a conversation with the model's chat template and encodes it.

Called on HTTP threads. The template comes with the model and runs in a sandbox. Text that a client wrote
never becomes a control token (see `hide`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
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
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

LAST_USER_MESSAGE = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% if not users %}{{ raise_exception('there is no message of a user') }}{% endif %}"
    "{{ users[-1].content }}"
)
"""Of a conversation, AI-OS gives a brain only the text of the user's last message."""

NO_TEMPLATE = (
    "This model has no chat template, so it cannot answer messages: send a prompt to /v1/completions, "
    "or start the server with --chat-template FILE."
)

# A special token is hidden as its number between two surrogates, which a client's text cannot contain.
_OPEN, _CLOSE = "\ud800", "\udfff"
_HIDDEN = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")

# What a template may raise for a client's messages: `raise_exception`, undefined names, None + str, ...
_TEMPLATE_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_OWN_ARGUMENTS = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "messages",
    "return_assistant_tokens_mask",
}


class Written(str):
    """Text of a message in which the server itself wrote special tokens; those of the client are hidden."""


class Options(TypedDict, total=False):
    """How to render; `continue_final_message` leaves the last message open, for the model to continue it."""

    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any] | None


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Unpack[Options]
) -> list[int]:
    """The tokens of the rendered conversation; nothing is added, so there is no second BOS."""
    return _encode(tokenizer, _render_hidden(tokenizer, messages, **options))


def render_text(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Unpack[Options]
) -> str:
    """The conversation as text for people; it does not show which control tokens a client wrote as text."""
    return _reveal(_render_hidden(tokenizer, messages, **options), tokenizer.special_tokens)


def template_of(tokenizer: Tokenizer) -> str | None:
    """The model's own template; else Llama 3's for a vocabulary that has its tokens; else none."""
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    return _LLAMA3_TEMPLATE if set(_LLAMA3_TOKENS) <= set(tokenizer.special_tokens) else None


def check_template(tokenizer: Tokenizer) -> None:
    """Compiles the template, so that a broken one stops the start and the first request need not wait."""
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
    if taken := _OWN_ARGUMENTS & (template_kwargs or {}).keys():
        raise BadRequest(f"The server sets the template argument {min(taken)}.", param="chat_template_kwargs")
    conversation = [_plain_message(number, message, template) for number, message in enumerate(messages)]
    specials = tokenizer.special_tokens
    try:
        return render_template(
            template,
            hide(conversation, specials),
            _special_names(tokenizer) | hide(template_kwargs or {}, specials),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        )
    except RecursionError:
        problem = "'chat_template_kwargs' is nested too deeply."
        raise BadRequest(problem, param="chat_template_kwargs") from None
    except _TEMPLATE_FAILURES as error:
        problem = f"The chat template refuses these messages: {_reveal(str(error), specials)}"
        raise BadRequest(problem, param="messages") from error


def _plain_message(number: int, message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message as templates expect it: with a string as content and a role that the template knows."""
    role = message.get("role")
    if role == "developer" and "developer" not in template:
        role = "system"
    content = message.get("content")
    if content is not None or not message.get("tool_calls"):  # some templates show calls only beside a null
        content = _plain_content(number, role, content)
    return {**message, "role": role, "content": content}


def _plain_content(number: int, role: Any, content: Any) -> str:
    where = f"messages[{number}].content"
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where} must be a string or a list of text parts.", param=where)
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        problem = f"This model reads text only: {where}.type must be 'text', not {kind!r}."
        raise BadRequest(problem, param=f"{where}.type")
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


def hide(value: Any, specials: Sequence[str]) -> Any:
    """Hides the strings of special tokens in what a client wrote, so that only the template's remain.

    Filters such as `trim` treat the replacement as they would treat the string. Other values stay as they
    are.
    """
    return _change_texts(value, _hider(tuple(specials)))


@functools.lru_cache(maxsize=16)
def _hider(specials: tuple[str, ...]) -> Callable[[str], str]:
    """A function that hides these in a text, in one pass.

    A request may have many texts, and a vocabulary hundreds of special tokens.
    """
    if not specials:
        return str
    hidden = {special: f"{_OPEN}{number}{_CLOSE}" for number, special in enumerate(specials)}
    pattern = re.compile("|".join(map(re.escape, specials)))
    return lambda text: pattern.sub(lambda match: hidden[match[0]], text)


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Written):
        return value
    if isinstance(value, str):
        if not is_unicode(value):
            problem = "A message contains half of a surrogate pair, which is not a character."
            raise BadRequest(problem, param="messages")
        return change(value)
    if isinstance(value, Mapping):
        return {_change_texts(key, change): _change_texts(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_change_texts(item, change) for item in value]
    return value


def _reveal(text: str, specials: Sequence[str]) -> str:
    return _HIDDEN.sub(lambda match: specials[int(match[1])], text)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a rendering; a span between special tokens that contains a hidden one is plain text."""
    if _OPEN not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    tokens: list[int] = []
    ordinary = ""
    for span in tokenizer.split_specials(text):
        if _OPEN not in span:
            ordinary += span
            continue
        tokens += tokenizer.encode(ordinary, add_special_tokens=False)
        tokens += tokenizer.encode_plain(_reveal(span, tokenizer.special_tokens))
        ordinary = ""
    return tokens + tokenizer.encode(ordinary, add_special_tokens=False)
