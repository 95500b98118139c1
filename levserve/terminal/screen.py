"""What stderr shows beside the text of an answer: thoughts, hints, and a line of progress that goes away.

Escape sequences are written only to a terminal that understands them. Used on the main thread.
"""

from __future__ import annotations

import os
import sys
import unicodedata

CLEAR = "\r\x1b[K"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
TAB_OR_CONTROL = str.maketrans(dict.fromkeys(range(32), " "))


def has_escapes() -> bool:
    """Whether stderr is a terminal that understands escape sequences; TERM=dumb says that it does not."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def redraw(line: str) -> None:
    """Shows a line in place of the one before. It is cut to fit, because only one row can be cleared."""
    shown = fit(line.translate(TAB_OR_CONTROL), os.get_terminal_size(sys.stderr.fileno()).columns - 1)
    print(f"{CLEAR}{shown}", end="", file=sys.stderr, flush=True)


def fit(line: str, width: int) -> str:
    """As much of the beginning as fits; Chinese characters and the like take two columns."""
    used = 0
    for index, character in enumerate(line):
        used += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > width > 0:  # a terminal that does not tell its width says 0
            return line[:index]
    return line


def hint(text: str) -> None:
    """Says something about an answer, on a line of its own."""
    print(f"({text})", file=sys.stderr, flush=True)
