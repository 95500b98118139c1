"""Finds out from a chat template how its model writes calls, by rendering a call with made-up names.

Runs while a model is loaded. A format matches if its own spelling of the call is in the rendering; of several
that match, the one with the longest spelling is chosen.
"""

from __future__ import annotations

import itertools
from typing import Any

from levserve.errors import BadRequest, StartupError
from levserve.text.chat import render_text, template_of
from levserve.text.tokenizer import Tokenizer
from levserve.text.tools.families import BY_NAME, FORMATS, PROMPTED
from levserve.text.tools.format import ToolFormat
from levserve.text.tools.history import History, TemplateUse

AUTO = "auto"
ID = "QQid00000"
ARGUMENTS = {"QQkey": "QQval"}
ASKED = {"role": "user", "content": "QQask"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "QQfun",
            "description": "QQdoes",
            "parameters": {"type": "object", "properties": {"QQkey": {"type": "string"}}},
        },
    }
]


def find_history(tokenizer: Tokenizer, wanted: str = AUTO) -> History:
    """The history in the format that was found, or in the one that `wanted` names.

    Raises `StartupError` for a name that does not exist.
    """
    if wanted != AUTO and wanted not in BY_NAME:
        names = ", ".join([AUTO, *BY_NAME])
        raise StartupError(f"--tool-format {wanted}: there is no such format; there are {names}")
    uses = [
        TemplateUse(shows_calls=True, takes_text=takes_text, wants_null=wants_null)
        for wants_null, takes_text in itertools.product((False, True), repeat=2)
    ]
    lists_tools = _lists_tools(tokenizer)
    known = FORMATS if wanted == AUTO else (BY_NAME[wanted],)
    for use in uses:
        shown = _show_call(tokenizer, use)
        matching = [form for form in known if _signature(form) in shown]
        if matching:
            form = max(matching, key=lambda form: len(_signature(form)))
            use = TemplateUse(lists_tools, True, use.takes_text, use.wants_null)
            return History(form, use, tokenizer.special_tokens)
    form = _guess(tokenizer) if wanted == AUTO else BY_NAME[wanted]
    use = TemplateUse(lists_tools and form is not PROMPTED, has_system=_has_system(tokenizer))
    return History(form, use, tokenizer.special_tokens)


def _show_call(tokenizer: Tokenizer, use: TemplateUse) -> str:
    """A conversation with a call, rendered without tools and with them; white space is removed."""
    arguments: Any = ARGUMENTS if not use.takes_text else '{"QQkey": "QQval"}'
    call = {"id": ID, "type": "function", "function": {"name": "QQfun", "arguments": arguments}}
    answer = {"role": "assistant", "content": None if use.wants_null else "", "tool_calls": [call]}
    messages: list[dict[str, Any]] = [ASKED, answer]
    return _squeeze(_render(tokenizer, messages) + _render(tokenizer, messages, tools=TOOLS))


def _signature(form: ToolFormat) -> str:
    """How the call begins in this format, up to the end of its arguments, without white space."""
    if form.shown_as:
        return _squeeze(form.shown_as)
    return _squeeze(form.opening + form.before + form.body.spell("QQfun", ARGUMENTS, ID))


def _guess(tokenizer: Tokenizer) -> ToolFormat:
    """The format of a template that asks for calls and does not show any; else `PROMPTED`."""
    template = template_of(tokenizer) or ""
    if "functools[" in template:
        return BY_NAME["phi4-functools"]
    if "tools" in template and "<|/tool_call|>" in (*tokenizer.special_tokens, template):
        return BY_NAME["phi4"]
    if "tools" in template and "<|tool_call|>" in template:
        return BY_NAME["granite"]
    return PROMPTED


def _lists_tools(tokenizer: Tokenizer) -> bool:
    return "QQfun" in _render(tokenizer, [ASKED], tools=TOOLS)


def _has_system(tokenizer: Tokenizer) -> bool:
    return "QQsystem" in _render(tokenizer, [{"role": "system", "content": "QQsystem"}, ASKED])


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], **names: Any) -> str:
    try:
        return render_text(tokenizer, messages, add_generation_prompt=False, template_kwargs=names)
    except BadRequest:  # it refuses such a conversation, or there is no template
        return ""


def _squeeze(text: str) -> str:
    return "".join(text.split())
