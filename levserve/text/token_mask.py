"""Sets of tokens as integers with a bit for each token, and as the masks that a `Matcher` returns."""

from __future__ import annotations

from collections.abc import Iterable


def to_bits(tokens: Iterable[int]) -> int:
    """One bit for each token. For few tokens: each costs a copy of the integer."""
    bits = 0
    for token in tokens:
        bits |= 1 << token
    return bits


def all_bits(vocab_rows: int) -> int:
    return (1 << vocab_rows) - 1


def to_mask(bits: int, vocab_rows: int) -> bytes:
    """Whole words of 32 bits; the first token is the lowest bit of the first byte."""
    return bits.to_bytes(-(-vocab_rows // 32) * 4, "little")
