"""Reads gpt-oss's answers, which are messages in channels: thoughts, calls, and the answer itself.

A message has a head up to `<|message|>`, which names its channel and for a call its recipient, and ends with
one of several tokens. The prompt has already written the beginning of the first head.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from levserve.text.parts import Content, Thought
from levserve.text.tools.scanner import Steps
from levserve.text.tools.stepwise import StepwiseReader

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
END = re.compile("|".join(map(re.escape, ENDS)))
LONGEST = max(map(len, ENDS)) - 1
RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.\-]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyReader(StepwiseReader):
    """Treats a call of an unknown function, and text without channels, as content."""

    def _read(self) -> Steps[None]:
        scanner = self._scanner
        while (yield from scanner.peek()):
            head = yield from scanner.take_until(MESSAGE)
            if head is None:
                self._show_headless(scanner.text[scanner.at :])
                return
            scanner.drop()
            yield from self._read_message(head)

    def _read_message(self, head: str) -> Steps[None]:
        recipient, channel = RECIPIENT.search(head), CHANNEL.search(head)
        if recipient and recipient[1] in self._calls.tools:
            self._calls.start(recipient[1])
            yield from self._copy(self._calls.add)
        elif channel and channel[1] == "analysis":
            self.is_thinking = True
            yield from self._copy(self._think)
            self.is_thinking = False
        else:
            yield from self._copy(self._show)

    def _copy(self, emit: Callable[[str], None]) -> Steps[None]:
        """Passes on the text of a message as it comes, up to its end."""
        scanner = self._scanner
        while True:
            found = END.search(scanner.text)
            end = found.start() if found else len(scanner.text)
            if found is None and not scanner.is_ended:
                end = _before_mark(scanner.text)
            if end:
                emit(scanner.text[:end])
            scanner.at = found.end() if found and found[0] != "<|start|>" else end
            scanner.drop()
            if found or scanner.is_ended:
                return
            yield

    def _show_headless(self, text: str) -> None:
        """Text without a head is content, unless it is the beginning of a head that was cut off."""
        if not text.startswith(("<|channel|>", "<|start|>")) and not text.lstrip().startswith(
            "to=functions."
        ):
            self._show(text)

    def _show(self, text: str) -> None:
        self._calls.parts.append(Content(text))

    def _think(self, text: str) -> None:
        self._calls.parts.append(Thought(text))


def _before_mark(text: str) -> int:
    """The end of the text that cannot belong to the mark at the end of a message."""
    start = text.rfind("<", max(len(text) - LONGEST, 0))
    return start if start >= 0 and any(mark.startswith(text[start:]) for mark in ENDS) else len(text)
