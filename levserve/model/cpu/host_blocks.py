"""Rounds matrices to int8 with a scale for every 32 inputs (`int8_blocks`) when a model is loaded."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from levserve.jit.builder import F32, I8, I32, ROUNDING_CONSTANT, Builder, Value
from levserve.jit.host_call import HostFunction
from levserve.jit.target import Target, detect_target
from levserve.model.cpu.rotation import rotate_block
from levserve.model.int8_blocks import BLOCK, LARGEST_SCALE, SCALE_FACTOR, SMALLEST_SCALE, TooLarge
from levserve.model.int8_packing import SMALLEST, STEPS

LEVELS = range(15, 7, -1)
"""How many steps there may be from the smallest value of a block to the largest, the likeliest first."""
TOLERANCE = 1e-3
"""How far a value may be from a whole number of steps: float32 errors are much smaller, chance is not."""
BLOCK_BYTES = 4 * BLOCK


def round_blocks(
    rows: NDArray[np.float32], *, is_rotated: bool
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Rows [out, in] as int8, and their scales [out, in / 32], multiplied by `SCALE_FACTOR`.

    A rotated block is not divided by the square root of its size, so products with it are 32 times too large.
    """
    assert rows.flags.c_contiguous and rows.shape[1] % BLOCK == 0
    target, num_blocks = detect_target(), rows.size // BLOCK
    scale = np.empty((len(rows), rows.shape[1] // BLOCK), np.float32)
    _scaling(is_rotated, target)(rows, scale, num_blocks)
    scale = np.maximum(scale * np.float32(SCALE_FACTOR), np.float32(SMALLEST_SCALE))
    if not scale.max() <= LARGEST_SCALE:  # or NaN
        raise TooLarge(
            f"a matrix has a value of {np.abs(rows).max():.0f}, too large for int8 with block scales"
        )
    stored, integers = scale.astype(np.float16), np.empty(rows.shape, np.int8)
    inverses = np.float32(SCALE_FACTOR) / stored.astype(np.float32)
    _rounding(is_rotated, target)(rows, inverses, integers, num_blocks)
    return integers, stored


def load_functions(*, is_rotated: bool) -> None:
    """Compiles the functions, so that threads find them compiled."""
    _scaling(is_rotated, detect_target())
    _rounding(is_rotated, detect_target())


@functools.cache
def _scaling(is_rotated: bool, target: Target) -> HostFunction:
    write = functools.partial(_write_scaling, is_rotated=is_rotated)
    return HostFunction(f"levserve_scale_blocks_{is_rotated:d}", target, 3, write)


@functools.cache
def _rounding(is_rotated: bool, target: Target) -> HostFunction:
    write = functools.partial(_write_rounding, is_rotated=is_rotated)
    return HostFunction(f"levserve_round_blocks_{is_rotated:d}", target, 4, write)


def _write_scaling(builder: Builder, *, is_rotated: bool) -> None:
    """Stores the scale of each block as float32."""
    *pointers, count = builder.arguments
    rows, scales = map(builder.to_pointer, pointers)
    with builder.loop(0, count) as block:
        values = load_block(builder, rows + block * BLOCK_BYTES)
        numbers = rotate_block(values, lanes_of(builder)) if is_rotated else values
        largest, place = builder.largest_magnitude(numbers).maximum(SMALLEST), scales + block * 4
        builder.store(place, largest / STEPS)
        if is_rotated:
            step, _ = find_step(builder, values, LEVELS)
            times = step * (STEPS + 0.5) / largest  # finer, for the rounded sum of all
            with builder.when(times >= 1.0):
                whole = times.convert("fptosi", I32).convert("sitofp", F32)
                builder.store(place, step / whole)


def find_step(builder: Builder, values: Sequence[Value], choices: range) -> tuple[Value, Value]:
    """The step of which a block's values are multiples, apart from a constant, or 0 if there is none; and the
    smallest value."""
    largest = functools.reduce(Value.maximum, values).reduce_max()
    smallest = functools.reduce(Value.maximum, [each * -1.0 for each in values]).reduce_max() * -1.0
    spread = largest - smallest
    step = builder.variable(spread.full_like(0.0))
    for levels in choices:
        with builder.when(step.get().equals(0)):
            factor, least = (
                each.splat(lanes_of(builder))
                for each in (spread.full_like(float(levels)) / spread.maximum(SMALLEST), smallest)
            )
            positions = [(each - least) * factor for each in values]
            distances = [each - (each + ROUNDING_CONSTANT - ROUNDING_CONSTANT) for each in positions]
            with builder.when(builder.largest_magnitude(distances) < TOLERANCE):
                step.set(spread / float(levels))
    return step.get(), smallest


def _write_rounding(builder: Builder, *, is_rotated: bool) -> None:
    """Stores the integers nearest to each block's numbers times its inverse scale."""
    *pointers, count = builder.arguments
    rows, inverses, into = map(builder.to_pointer, pointers)
    with builder.loop(0, count) as block:
        numbers = load_block(builder, rows + block * BLOCK_BYTES)
        numbers = rotate_block(numbers, lanes_of(builder)) if is_rotated else numbers
        inverse = builder.load(inverses + block * 4, F32).splat(lanes_of(builder))
        for index, vector in enumerate(numbers):
            store_rounded(builder, vector * inverse, into + block * BLOCK, index)


def store_rounded(builder: Builder, numbers: Value, into: Value, index: int) -> None:
    steps = numbers.minimum(float(STEPS)).maximum(float(-STEPS)) + ROUNDING_CONSTANT
    integers = steps.convert("bitcast", I32).convert("trunc", I8)
    builder.store(into + index * lanes_of(builder), integers)


def load_block(builder: Builder, place: Value) -> list[Value]:
    lanes = lanes_of(builder)
    return [builder.load(place + 4 * at, F32, lanes) for at in range(0, BLOCK, lanes)]


def lanes_of(builder: Builder) -> int:
    return min(builder.target.lanes, BLOCK)
