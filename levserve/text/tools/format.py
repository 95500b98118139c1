"""How a family of models writes calls of tools, described as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from levserve.text.lark import Lark, quote_regex
from levserve.text.tools.body import Body
from levserve.text.tools.request import Tool

MAX_CALLS = 16
"""In one answer."""


@dataclass(frozen=True, slots=True)
class SpeltCall:
    """A call of the history."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Two calls are written as `opening before BODY after separator before BODY after closing`.

    Without an `opening` each call stands for itself, and text may come between calls.
    """

    name: str
    body: Body
    before: str
    trigger: str
    """The part of `opening` or `before` after which the text of an answer must be a call."""
    after: str = ""
    separator: str = "\n"
    opening: str = ""
    closing: str = ""
    is_at_start: bool = False
    """Whether calls stand only at the very beginning of an answer, because they begin like ordinary text."""
    is_single: bool = False
    """Whether an answer has at most one call."""
    visible: tuple[str, ...] = ()
    """Special tokens that have to be in the text for calls to be found."""
    has_short_ids: bool = False
    shown_as: str = ""
    """How templates begin a call of QQfun in the history, if that differs from what models write."""
    has_channels: bool = False
    """Whether an answer consists of messages in channels, some of which are thoughts; see `harmony.py`."""

    def max_calls(self, *, is_parallel: bool) -> int:
        return MAX_CALLS if is_parallel and not self.is_single else 1

    def write_calls(self, lark: Lark, tools: Sequence[Tool], num_calls: int) -> str:
        """An expression for one call or more, and nothing else; raises `BadRequest`."""
        return self._calls(lark, self.opening, self._call(lark, tools), num_calls)

    def write_after_trigger(self, lark: Lark, tools: Sequence[Tool], num_calls: int) -> str:
        """An expression for what follows the trigger: the rest of one call, or of all of them."""
        if not self.opening:
            start = lark.literal(self.before.partition(self.trigger)[2])
            return f"{start} {self._bodies(lark, tools)} {lark.literal(self.after)}"
        opening = self.opening.partition(self.trigger)[2]
        return self._calls(lark, opening, self._call(lark, tools), num_calls)

    def guard(self, tools: Sequence[Tool]) -> str:
        """A regular expression for the beginning of a call of one of the tools."""
        names = "|".join(quote_regex(tool.name) for tool in tools)
        start, end = quote_regex(self.opening + self.before), quote_regex(self.body.after_name)
        return f"{start}({names}){end}"

    def spell(self, calls: Sequence[SpeltCall]) -> str:
        """The calls as the model would have written them."""
        written = [
            self.before + self.body.spell(call.name, call.arguments, call.id) + self.after for call in calls
        ]
        return self.opening + self.separator.join(written) + self.closing

    def _calls(self, lark: Lark, opening: str, call: str, num_calls: int) -> str:
        more = f" ({lark.literal(self.separator)} {call}){{0,{num_calls - 1}}}" if num_calls > 1 else ""
        return f"{lark.literal(opening)} {call}{more} {lark.literal(self.closing)}"

    def _call(self, lark: Lark, tools: Sequence[Tool]) -> str:
        bodies = self._bodies(lark, tools)
        return lark.rule("call", f"{lark.literal(self.before)} {bodies} {lark.literal(self.after)}")

    def _bodies(self, lark: Lark, tools: Sequence[Tool]) -> str:
        bodies = [
            lark.rule(f"body_{number}", self.body.write_grammar(lark, number, tool))
            for number, tool in enumerate(tools)
        ]
        return f"({' | '.join(bodies)})"
