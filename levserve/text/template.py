"""Renders chat templates: Jinja in a sandbox, with the names that Hugging Face defines for templates.

Called on HTTP threads. A model and its template may come from anywhere, so the template sees only plain data
and nothing that leads to Python's own objects. The text is the same as with transformers, whose import takes
a second of CPU time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from levserve.errors import StartupError

# Marks the end of a final message that is to be continued: half of a surrogate pair, which no text contains.
_END = "\udffe"
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    names: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """The conversation as text. Raises what the template raises, and ValueError for values it cannot take.

    `names` are further variables. With `continue_final_message` the text ends where the last message ends.
    """
    for name in ("tools", "documents"):
        given = names.get(name)
        is_list = isinstance(given, list) and all(isinstance(entry, dict) for entry in given)
        if given is not None and not is_list:
            raise ValueError(f"'{name}' must be a list of objects")
    conversation = [_with_reasoning(message) for message in messages]
    if continue_final_message:
        conversation[-1]["content"] += f"{_END} "
    missing = {"tools": None, "documents": None}  # not undefined: some templates ask `tools is not none`
    given = {**names, "messages": conversation, "add_generation_prompt": add_generation_prompt}
    text = _compile(template).render({**missing, **given})
    return _cut(text, messages[-1]["content"]) if continue_final_message else text


def find_names(template: str) -> frozenset[str]:
    """The variables that a template reads."""
    return frozenset(find_undeclared_variables(_environment().parse(template)))


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the model's reasoning under both names that templates read."""
    for name in _REASONING:
        if message.get(name) is not None:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return dict(message)


def _cut(text: str, final: str) -> str:
    """The text up to the end of its final message, without trailing spaces if the template trimmed them."""
    before, end, after = text.rpartition(_END)
    if not end or final.strip() not in text:
        raise ValueError("the final message cannot be continued, because the template omits part of it")
    return before if after.startswith(" ") else before.rstrip()


@lru_cache
def _compile(template: str) -> Template:
    try:
        return _environment().from_string(template)
    except TemplateSyntaxError as error:
        raise StartupError(f"the chat template is broken at line {error.lineno}: {error.message}") from error
    except SyntaxError as error:  # a `break` outside a loop shows when Python compiles Jinja's code
        raise StartupError(f"the chat template is broken: {error.msg}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the model's answers for training; here its content is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _Dict:
    """What templates need of `dict`, without the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """A namespace that refuses names with a leading underscore, which Jinja and Python use for methods."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_public(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a name in a namespace cannot start with an underscore, as {name!r} does")
