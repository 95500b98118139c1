"""Models that think before they answer: the marks around their thoughts, found in the chat template.

`find_reasoning` runs once, while the model is loaded. HTTP threads share what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from levserve.errors import BadRequest
from levserve.schedule.constraint import Constraint
from levserve.text.chat import render_text, template_of
from levserve.text.mark import Mark
from levserve.text.parts import PartReader
from levserve.text.template import find_names
from levserve.text.thought_phases import AfterThoughts, encode_marks
from levserve.text.thought_reader import ThoughtReader
from levserve.text.tokenizer import Tokenizer

SWITCHES = ("enable_thinking", "thinking")
"""The variables by which templates switch thinking on and off."""
EFFORT = "reasoning_effort"
TAIL_TOKENS = 64
"""Enough of a prompt's end to see a mark in it."""


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """How a family of models writes its thoughts."""

    signs: tuple[str, ...]
    """A template of the family contains at least one of these."""
    begin: str
    end: str
    closing: str
    """What is written to end thoughts whose budget is spent: the end mark and the newlines around it."""
    closing_at_once: str | None = None
    """The same for a budget of 0, where no thoughts have to be ended; None if it is no different."""
    has_channels: bool = False
    """Whether `end` begins the answer's channel, and channels of other kinds may stand before it. The
    format's own reader separates them; see `text/tools`."""


FAMILIES: Mapping[str, ThoughtMarks] = {
    "harmony": ThoughtMarks(
        ("<|channel|>analysis",),
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
        has_channels=True,
    ),
    "gemma": ThoughtMarks(
        ("<|channel>thought", "<channel|>"), "<|channel>thought\n", "<channel|>", "\n<channel|>"
    ),
    "mistral": ThoughtMarks(("[THINK]", "[/THINK]"), "[THINK]", "[/THINK]", "[/THINK]"),
    "think": ThoughtMarks(("<think>", "</think>"), "<think>", "</think>", "\n</think>\n\n"),
}
"""By the names that `--reasoning` takes; a template is checked for each in this order."""


class Begun(Enum):
    """What a prompt's end says about the thoughts."""

    OPEN = auto()
    """The prompt has begun them."""
    MODEL = auto()
    """The model may begin them."""
    CLOSED = auto()
    """They have ended: the answer follows."""


class Reasoning:
    """How one model thinks."""

    def __init__(self, family: str, tokenizer: Tokenizer) -> None:
        self.family = family
        self.marks = FAMILIES[family]
        self._tokenizer = tokenizer
        self._begin = Mark(self.marks.begin, tokenizer)
        self._end = Mark(self.marks.end, tokenizer)
        template = template_of(tokenizer)
        names = frozenset[str]() if template is None else find_names(template)
        self.switch = next((name for name in SWITCHES if name in names), None)
        self.reads_effort = EFFORT in names
        texts = (self.marks.begin, self.marks.end)
        hidden = [special for special in tokenizer.special_tokens if any(special in text for text in texts)]
        self.hidden = tuple(hidden)
        """The special tokens of the marks. A reader has to see them, and clients never do."""
        tokens = map(tokenizer.backend.token_to_id, hidden)
        self.visible = frozenset(token for token in tokens if token is not None)

    @property
    def description(self) -> str:
        """What was found, for the log."""
        begin, end = self.marks.begin.strip(), self.marks.end.strip()
        told = f"switched by {self.switch}" if self.switch else "always on"
        return f"{self.family} ({begin} ... {end}, {told})"

    def look_at(self, prompt: list[int]) -> Begun:
        """Whether a rendered prompt ends within a thought, or after one."""
        return self._look_at_text(self._tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False))

    def look_at_message(self, text: str) -> Begun:
        """The same for an answer that is to be continued."""
        if self.marks.begin in text and self.marks.end not in text.rpartition(self.marks.begin)[2]:
            return Begun.OPEN
        return Begun.CLOSED if text.strip() else Begun.MODEL

    def _look_at_text(self, text: str) -> Begun:
        seen = text.rstrip()
        if seen.endswith(self.marks.begin.rstrip()):
            return Begun.OPEN
        return Begun.CLOSED if seen.endswith(self.marks.end) else Begun.MODEL

    def ask_for(self, effort: str) -> dict[str, Any]:
        """The template's variables for an effort; `none` switches thinking off, where that is possible."""
        is_on = effort != "none"
        names: dict[str, Any] = {}
        if self.switch is not None:
            names[self.switch] = is_on
        if self.reads_effort and is_on:
            names[EFFORT] = effort
        return names

    def constrain(
        self, begun: Begun, inner: Constraint | None, vocab_rows: int, budget: int | None
    ) -> Constraint | None:
        """The constraint on thoughts and answer together, given `inner`, the one on the answer alone."""
        if begun is Begun.CLOSED or (inner is None and budget is None):
            return inner
        marks = self.marks
        closing = marks.closing
        if budget == 0 and marks.closing_at_once is not None:
            closing = marks.closing_at_once
        elif budget is not None and marks.has_channels:
            budget += len(encode_marks(self._tokenizer, marks.begin))
        opening = None if begun is Begun.OPEN or marks.has_channels else self._begin
        return AfterThoughts(
            self._end, inner, self._tokenizer, vocab_rows, opening=opening, budget=budget, closing=closing
        )

    def make_reader(self, begun: Begun, inner: PartReader | None) -> PartReader | None:
        """A reader that separates the thoughts from what `inner` reads."""
        if self.marks.has_channels:
            return inner
        is_open = begun is Begun.OPEN
        return ThoughtReader(
            self.marks.begin, self.marks.end, is_open=is_open, inner=inner, hidden=self.hidden
        )


def find_reasoning(tokenizer: Tokenizer, wanted: str = "auto") -> Reasoning | None:
    """How the model thinks, by its template or by the name that was asked for; None if it does not."""
    if wanted == "none":
        return None
    if wanted != "auto":
        return Reasoning(wanted, tokenizer)
    template = template_of(tokenizer)
    if template is None:
        return None
    texts = f"{template}\n{_prompts(tokenizer)}"
    for family, marks in FAMILIES.items():
        if any(sign in texts for sign in marks.signs):
            return Reasoning(family, tokenizer)
    return None


def _prompts(tokenizer: Tokenizer) -> str:
    """Generation prompts with thinking at its default, on and off: some marks are complete only in these."""
    found = []
    for kwargs in ({}, dict.fromkeys(SWITCHES, True), dict.fromkeys(SWITCHES, False)):
        try:
            found.append(render_text(tokenizer, [{"role": "user", "content": "?"}], template_kwargs=kwargs))
        except BadRequest:
            continue  # a template may refuse this conversation
    return "\n".join(found)
