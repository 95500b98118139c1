"""The arithmetic of the instructions in `tests/ptx.py`, for the 32 threads of a warp at once."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

LANES = 32
MASK = np.uint64(0xFFFFFFFF)


def halves(register: np.ndarray) -> np.ndarray:
    """The two bfloat16 values of each lane, as float32."""
    words = register.astype(np.uint32)
    return words.view(ml_dtypes.bfloat16).reshape(-1, 2).astype(np.float32)


def as_float(register: np.ndarray) -> np.ndarray:
    return register.astype(np.uint32).view(np.float32)


def as_bits(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32).view(np.uint32).astype(np.uint64)


def compute(operation: str, kind: str, given: list[np.ndarray]) -> np.ndarray:
    if kind == "f32.f16":
        return as_bits(given[0].astype(np.uint16).view(np.float16).astype(np.float32))
    if kind == "rn.bf16x2":
        first, second, third = map(halves, given)
        result = (first * second + third).astype(ml_dtypes.bfloat16)
        return result.reshape(-1).view(np.uint32).astype(np.uint64)
    if kind == "rn.bf16x2.f32":
        pairs = np.stack([as_float(each) for each in given[::-1]], -1).astype(ml_dtypes.bfloat16)
        return pairs.reshape(-1).view(np.uint32).astype(np.uint64)
    if kind.endswith("f32") and operation != "mov":
        numbers = [as_float(each) for each in given]
        exact = [each.astype(np.float64) for each in numbers]
        return as_bits(FLOATS[operation](*exact))
    result = INTEGERS[f"{operation}.{kind}" if operation == "setp" else operation](*given)
    is_long = kind.endswith("64") or kind.startswith("wide")
    return result.astype(np.uint64) & (MASK if not is_long else ~np.uint64(0))


FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda first, second: first + second,
    "mul": lambda first, second: first * second,
    "fma": lambda first, second, third: first * second + third,
}


def combine(first: np.ndarray, second: np.ndarray, third: np.ndarray, table: np.ndarray) -> np.ndarray:
    assert (table == 0xEA).all()
    return first & second | third


def permute(first: np.ndarray, second: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = first | second << np.uint64(32)
    result = np.zeros(LANES, np.uint64)
    for number in range(4):
        which = selector >> np.uint64(4 * number) & np.uint64(7)
        result |= (both >> which * np.uint64(8) & np.uint64(255)) << np.uint64(8 * number)
    return result


INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "mov": lambda value: value,
    "add": lambda first, second: first + second,
    "sub": lambda first, second: first - second,
    "mul": lambda first, second: first * second,
    "mad": lambda first, second, third: first * second + third,
    "div": lambda first, second: first // second,
    "rem": lambda first, second: first % second,
    "min": np.minimum,
    "and": lambda first, second: first & second,
    "or": lambda first, second: first | second,
    "xor": lambda first, second: first ^ second,
    "shr": lambda value, count: value >> count,
    "shl": lambda value, count: value << count,
    "lop3": combine,
    "prmt": permute,
    "setp.eq.u32": lambda first, second: first == second,
    "setp.ge.u32": lambda first, second: first >= second,
    "setp.gt.u32": lambda first, second: first > second,
    "setp.lt.u32": lambda first, second: first < second,
}
ARITHMETIC = tuple(f"{name}." for name in ("cvt", "setp", *FLOATS, *INTEGERS) if not name.startswith("setp."))
"""How the names of instructions that compute one register from others begin."""
