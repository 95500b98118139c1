"""The random numbers of `model/points.py` on a CPU: Threefry-2x32 of a request's seed and the position."""

from __future__ import annotations

from levserve.jit.builder import F32, I32, Builder, Value
from levserve.model.points import PARITY, ROTATIONS

Pair = tuple[Value, Value]


def make_points(builder: Builder, seed: Pair, position: Value) -> Pair:
    """The two numbers of a draw, at least 0 and below 1. Seed and position are int32."""
    key = _encrypt(seed, position)
    return _point(key, builder.constant(0, I32)), _point(key, builder.constant(1, I32))


def _point(key: Pair, place: Value) -> Value:
    first, second = _encrypt(key, place)
    mantissa = (first ^ second) >> 9 | 0x3F800000  # of a number from 1 to 2
    return mantissa.convert("bitcast", F32) - 1.0


def _encrypt(key: Pair, word: Value) -> Pair:
    """Encrypts the words 0 and `word` in 20 rounds."""
    keys = *key, key[0] ^ key[1] ^ PARITY
    x, y = keys[0], word + keys[1]
    for number in range(5):
        for count in ROTATIONS[number % 2]:
            x = x + y
            y = x ^ (y << count | y >> (32 - count))
        x = x + keys[(number + 1) % 3]
        y = y + keys[(number + 2) % 3] + (number + 1)
    return x, y
