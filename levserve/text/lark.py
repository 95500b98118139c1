"""Writes grammars for llguidance: literal texts with special tokens in them, and JSON that fits a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from levserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # the name does not exist at run time
    from llguidance._lib import JsonCompileOptions

SEPARATORS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space only after separators: where it is unlimited, models write it until they run out of tokens."""
EMPTY = '""'


class Lark:
    """The rules of one grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._specials = re.compile("|".join(map(re.escape, tokenizer.special_tokens)) or "(?!)")
        self._rules: dict[str, str] = {}

    def rule(self, name: str, expression: str) -> str:
        self._rules[name] = expression
        return name

    def literal(self, text: str) -> str:
        """An expression for exactly this text. It omits end tokens: a text may end where its grammar may."""
        parts = []
        at = 0
        for found in self._specials.finditer(text):
            parts += [quote(text[at : found.start()])] if found.start() > at else []
            token = self._tokenizer.backend.token_to_id(found[0])
            parts += [] if token in self._tokenizer.eos_ids else [f"<[{token}]>"]
            at = found.end()
        parts += [quote(text[at:])] if at < len(text) else []
        return " ".join(parts) or EMPTY

    def json(self, name: str, schema: Mapping[str, Any]) -> str:
        return self.rule(name, f"%json {json.dumps({**schema, 'x-guidance': SEPARATORS})}")

    def text(self, start: str) -> str:
        rules = [f"{name}: {expression}" for name, expression in {"start": start, **self._rules}.items()]
        return "\n".join(["%llguidance {}", *rules]) + "\n"


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def quote_regex(text: str) -> str:
    """A regular expression for exactly this text. `re.escape` also writes escapes that Rust does not know."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", r"\\\g<0>", text).replace("\n", "\\n")
