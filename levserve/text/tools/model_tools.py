"""Tools as one model uses them: made when the model is loaded, used by every request that has tools.

HTTP threads share it; it does not change.
"""

from __future__ import annotations

from collections.abc import Sequence

from levserve.errors import BadRequest
from levserve.schedule.constraint import Constraint
from levserve.text.combined import AnyOf
from levserve.text.grammar import GrammarKind, Grammars, GrammarText
from levserve.text.lark import Lark
from levserve.text.mark import Mark
from levserve.text.parts import PartReader
from levserve.text.phases import Triggered
from levserve.text.tokenizer import Tokenizer
from levserve.text.tools.arguments import arguments_schema
from levserve.text.tools.body import Calls
from levserve.text.tools.detect import AUTO, find_history
from levserve.text.tools.families import PROMPTED
from levserve.text.tools.format import ToolFormat
from levserve.text.tools.harmony import HarmonyReader
from levserve.text.tools.reader import CallReader
from levserve.text.tools.request import CallMode, Tool, ToolRequest

THOUGHTS = "<|channel|>analysis<|message|>"
AFTER_THOUGHTS = "<|end|><|start|>assistant"


class ModelTools:
    """How a model is told about tools, and how its calls are found and made to fit their schemas."""

    def __init__(self, tokenizer: Tokenizer, wanted: str = AUTO) -> None:
        self.history = find_history(tokenizer, wanted)
        self.form: ToolFormat = self.history.form
        self._tokenizer = tokenizer
        self._trigger = Mark(self.form.trigger, tokenizer)  # made once: it reads the whole vocabulary
        added = tokenizer.backend.get_added_tokens_decoder()
        self.visible = frozenset(
            token for token, entry in added.items() if entry.special and entry.content in self.form.visible
        )
        """The special tokens that a reader has to see."""

    @property
    def description(self) -> str:
        """What was found, for the log."""
        if self.history.use.lists_tools or self.history.use.shows_calls:
            return self.form.name
        return f"{self.form.name} (the chat template knows no tools)"

    def max_calls(self, is_parallel: bool | None) -> int:
        """How many calls one answer may have; None leaves that to the model's form."""
        # A model that was not trained for calls repeats the same one again and again if it may.
        may_repeat = self.form is not PROMPTED if is_parallel is None else is_parallel
        return self.form.max_calls(is_parallel=may_repeat)

    def make_reader(self, asked: ToolRequest | None) -> PartReader | None:
        """Finds the calls in one answer; None if there can be none."""
        tools = () if asked is None else asked.callable_tools
        if self.form.has_channels:
            return HarmonyReader(Calls(tools, has_short_ids=False))
        if asked is None or not tools:
            return None
        calls = Calls(tools, has_short_ids=self.form.has_short_ids)
        return CallReader(self.form, calls, must_call=asked.mode is CallMode.REQUIRED)

    def constrain(
        self, asked: ToolRequest, content: Constraint | None, grammars: Grammars
    ) -> Constraint | None:
        """The constraint on the answer, given the one on its content; raises `BadRequest`."""
        tools = asked.callable_tools
        if not tools:
            return content
        num_calls = self.max_calls(asked.is_parallel)
        lark = Lark(self._tokenizer)
        if asked.mode is CallMode.AUTO and content is None and not self.form.is_at_start:
            rest = self.form.write_after_trigger(lark, tools, num_calls)
            inner = self._compile(lark, rest, tools, grammars)
            max_times = 1 if self.form.opening else num_calls
            rows = grammars.vocab_rows
            return Triggered(self._trigger, inner, self._tokenizer, rows, max_times=max_times)
        calls = self._compile(lark, self._calls(lark, tools, num_calls), tools, grammars)
        if asked.mode is CallMode.REQUIRED:
            return calls
        if content is None:
            free = f"/(?s:.*)/ & ~/(?s:{self.form.guard(tools)}.*)/"
            text = f"%llguidance {{}}\nstart: FREE\nFREE: {free}\n"
            content = grammars.compile(GrammarText(GrammarKind.GRAMMAR, text, "tools"))
        return AnyOf([content, calls])

    def _calls(self, lark: Lark, tools: Sequence[Tool], num_calls: int) -> str:
        calls = self.form.write_calls(lark, tools, num_calls)
        if not self.form.has_channels:
            return calls
        end = lark.literal(AFTER_THOUGHTS)
        thoughts = lark.rule("THOUGHTS", "/(?s:.*)/")
        return f"({lark.literal(THOUGHTS)} {thoughts} {end})? {calls}"

    def _compile(self, lark: Lark, start: str, tools: Sequence[Tool], grammars: Grammars) -> Constraint:
        try:
            return grammars.compile(GrammarText(GrammarKind.GRAMMAR, lark.text(start), "tools"))
        except BadRequest:
            for tool in tools:  # finds the tool at fault, so that the error names it
                param = f"{tool.param}.parameters"
                schema = Lark(self._tokenizer)
                text = schema.text(schema.json("args", arguments_schema(tool)))
                grammars.compile(GrammarText(GrammarKind.GRAMMAR, text, param))
            raise
