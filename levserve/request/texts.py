"""Texts in the four forms that clients send: a string, its tokens, or a list of either."""

from __future__ import annotations

from levserve.errors import BadRequest

Texts = str | list[str | int | list[int]]
"""The type allows a mixture; `check_texts` refuses it."""


def check_texts(texts: Texts, param: str) -> None:
    kinds = {type(item) for item in texts} if isinstance(texts, list) else {str}
    if len(kinds) != 1:
        wanted = "a string, or a non-empty list of strings, of token ids or of lists of token ids"
        what, code = ("type", "invalid_type") if kinds else ("value", "empty_array")
        raise BadRequest(f"Invalid {what} for '{param}': expected {wanted}.", param=param, code=code)


def split_texts(texts: Texts) -> list[str | list[int]]:
    """Each text as a string to tokenize or as the tokens themselves."""
    if isinstance(texts, str):
        return [texts]
    tokens = [item for item in texts if isinstance(item, int)]
    return [tokens] if tokens else [item for item in texts if not isinstance(item, int)]
