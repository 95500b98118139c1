"""Suggests what an unknown path was probably meant to be: most often the base URL lacks its /v1."""

from __future__ import annotations

from collections.abc import Iterable

from levserve.settings.file import did_you_mean

MAX_PATH = 100
"""Characters of a path that are looked at and shown."""


def describe_unknown(path: str, known: Iterable[str]) -> str:
    """The message for a path that is none of the known ones."""
    shown = path[:MAX_PATH]
    rules = [rule for rule in known if "<" not in rule]
    hint = _same_end(shown, rules) or _same_beginning(shown, rules) or did_you_mean(shown, rules)
    return f"There is no path {shown} here{hint}"


def _same_end(path: str, rules: Iterable[str]) -> str:
    """Finds /v1/models for /models, /api/v1/models and /v1/v1/models."""
    words = path.strip("/").split("/")
    ends = ["/v1/" + "/".join(words[start:]) for start in range(len(words))]
    found = next((end for end in ends if end in rules), None)
    return f"; did you mean {found}?" if found else ""


def _same_beginning(path: str, rules: Iterable[str]) -> str:
    """Finds /v1/chat/completions for /v1/chat."""
    beginning = path.rstrip("/") + "/"
    longer = [rule for rule in rules if rule.startswith(beginning)]
    return f"; did you mean {longer[0]}?" if len(longer) == 1 else ""
