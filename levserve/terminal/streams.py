"""Prepares stdin, stdout and stderr: closed ones, and encodings that cannot hold every text.

What stdout's encoding cannot show becomes a question mark. What stdin or the command line holds may be bytes
that the locale could not decode; Python keeps these as surrogates, and `as_utf8` decodes them again.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

from levserve.errors import ConfigError


def prepare_streams() -> None:
    if sys.stderr is None:  # closed; print would write to stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # UTF-8 holds everything but surrogates; those of a path are written as the bytes that they stand for.
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def require_stdin() -> None:
    if sys.stdin is None:
        raise ConfigError("stdin is closed")


def as_utf8(text: str) -> str:
    """The text itself if it is whole, or what its bytes are as UTF-8; raises `ValueError` if they are not."""
    return text.encode("utf-8", "surrogateescape").decode()
