"""An answer as it comes: its text goes to stdout, and what the model thinks before it to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from levserve.api.results import Piece
from levserve.terminal.screen import DIM, PLAIN, has_escapes, hint


class Answer:
    """What has come so far. `finish_reason` is empty until the answer has ended by itself."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason = ""
        self._num_tokens = 0
        self._is_thinking = False

    def write(self, pieces: Iterable[Piece]) -> None:
        """Writes the pieces; thoughts are dimmed in a terminal and end with a line break."""
        try:
            for piece in pieces:
                self._num_tokens += len(piece.tokens)
                self.finish_reason = piece.finish_reason or ""
                if piece.thoughts:
                    self._show_thoughts(piece.thoughts)
                if piece.text:
                    self._end_thoughts()
                    self.text += piece.text
                    print(piece.text, end="", flush=True)
        finally:
            self._end_thoughts()

    def explain_end(self, advice: str) -> None:
        """Says on stderr if a limit ended the answer; the `advice` is about the limit of tokens."""
        ended = "ended the answer" if self.text else "was reached before the answer began"
        if self.finish_reason == "length":
            limit = "1 token" if self._num_tokens == 1 else f"{self._num_tokens} tokens"
            hint(f"the limit of {limit} {ended}; {advice}")
        elif self.finish_reason == "deadline":
            hint(f"the time limit {ended}; --request-timeout sets it")

    def _show_thoughts(self, text: str) -> None:
        if not self._is_thinking and has_escapes():
            text = DIM + text
        self._is_thinking = True
        print(text, end="", file=sys.stderr, flush=True)

    def _end_thoughts(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            print(PLAIN if has_escapes() else "", file=sys.stderr, flush=True)
