"""Finds calls in the text of an answer while it streams; all other text is content.

White space around calls is dropped. Text that may become a call is held back until that is certain. If an
answer was cut off within the marks around a call, they are left out.
"""

from __future__ import annotations

from levserve.text.parts import Content
from levserve.text.thought_reader import overlap
from levserve.text.tools.body import Calls
from levserve.text.tools.format import ToolFormat
from levserve.text.tools.scanner import Steps
from levserve.text.tools.stepwise import StepwiseReader


class CallReader(StepwiseReader):
    """For formats that `ToolFormat` describes. An answer that must call has no text before its first mark."""

    def __init__(self, form: ToolFormat, calls: Calls, *, must_call: bool = False) -> None:
        super().__init__(calls)
        self._form = form
        self._must_call = must_call

    def _read(self) -> Steps[None]:
        scanner = self._scanner
        if self._form.is_at_start:
            yield from scanner.skip_space()
            if not (yield from self._read_calls()):
                if self._must_call and scanner.has_run_out:
                    return
                scanner.at = 0
            yield from self._show_rest()
            return
        while (yield from self._find_trigger()):
            start = scanner.at
            if (yield from self._read_calls()):
                yield from scanner.skip_space()
            elif scanner.has_run_out:
                return  # the answer was cut off before the name of a call was complete
            else:
                scanner.at = start
                yield from scanner.skip_space()
                self._show(scanner.at + 1)

    def _find_trigger(self) -> Steps[bool]:
        """Shows the text before the next trigger, except for the white space just before it."""
        scanner, trigger = self._scanner, self._form.trigger
        while True:
            found = scanner.text.find(trigger, scanner.at)
            end = found if found >= 0 else len(scanner.text)
            if found < 0:
                if scanner.is_ended:
                    self._show(end - overlap(scanner.text, trigger) if self._must_call else end)
                    return False
                end -= overlap(scanner.text, trigger)
            self._show(scanner.at + len(scanner.text[scanner.at : end].rstrip()))
            if found >= 0:
                return True
            yield

    def _show(self, end: int) -> None:
        """Shows the text up to this place as content."""
        scanner = self._scanner
        if end > scanner.at:
            self._calls.parts.append(Content(scanner.text[scanner.at : end]))
        scanner.at = end
        scanner.drop()

    def _show_rest(self) -> Steps[None]:
        if self._calls.count:
            yield from self._scanner.skip_space()
        while True:
            self._show(len(self._scanner.text))
            if self._scanner.is_ended:
                return
            yield

    def _read_calls(self) -> Steps[bool]:
        """Reads the calls that begin here; False if there is none."""
        form, scanner = self._form, self._scanner
        if not (yield from scanner.take(form.opening)) or not (yield from self._read_call()):
            return False
        if not form.opening:
            return True
        while True:
            if (yield from scanner.take(form.closing)):
                return True
            start = scanner.at
            if not (yield from scanner.take(form.separator)) or not (yield from self._read_call()):
                self._return_to(start)
                return True

    def _read_call(self) -> Steps[bool]:
        form, scanner = self._form, self._scanner
        if not (yield from scanner.take(form.before)) or not (
            yield from form.body.read(scanner, self._calls)
        ):
            return False
        start = scanner.at
        if not (yield from scanner.take(form.after)):
            self._return_to(start)
        return True

    def _return_to(self, place: int) -> None:
        """Goes back to where a mark is missing, or to the end if the answer was cut off inside the mark."""
        scanner = self._scanner
        scanner.at = len(scanner.text) if scanner.has_run_out else place
