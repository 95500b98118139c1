"""Rounds matrices to int8 around a middle of each block of 32 inputs, for products that widen them
(`widened_matrices`), when a model is loaded."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from levserve.jit.builder import F32, ROUNDING_CONSTANT, Builder
from levserve.jit.host_call import HostFunction
from levserve.jit.target import Target, detect_target
from levserve.model.cpu.host_blocks import BLOCK_BYTES, find_step, lanes_of, load_block, store_rounded
from levserve.model.int8_blocks import BLOCK, LARGEST_SCALE, SCALE_FACTOR, SMALLEST_SCALE, TooLarge
from levserve.model.int8_packing import SMALLEST, STEPS

LEVELS = range(31, 7, -1)
"""How many steps there may be from the smallest value of a block to the largest, in up to five bits."""


def round_blocks(
    rows: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float16], NDArray[np.float16]]:
    """Rows [out, in] as int8, with a scale and a middle for each block [out, in / 32], both multiplied by
    `SCALE_FACTOR`: a value is its integer times the scale, plus the middle. Nothing is rotated.

    Blocks that have one step for up to 32 values, as in files of four or five bits, keep it. Others have 127
    steps, and 0 as their middle.
    """
    assert rows.flags.c_contiguous and rows.shape[1] % BLOCK == 0
    target, num_blocks = detect_target(), rows.size // BLOCK
    found = np.empty((2, len(rows), rows.shape[1] // BLOCK), np.float32)
    _stepping(target)(rows, found[0], found[1], num_blocks)
    found *= np.float32(SCALE_FACTOR)
    scale = np.maximum(found[0], np.float32(SMALLEST_SCALE))
    if not (scale * STEPS + np.abs(found[1])).max() <= LARGEST_SCALE:  # or NaN
        raise TooLarge(f"a matrix has a value of {np.abs(rows).max():.0f}, too large for int8 with middles")
    scales, middles = scale.astype(np.float16), found[1].astype(np.float16)
    inverses = np.float32(SCALE_FACTOR) / scales.astype(np.float32)
    offsets = middles.astype(np.float32) / np.float32(SCALE_FACTOR)
    integers = np.empty(rows.shape, np.int8)
    _rounding(target)(rows, inverses, offsets, integers, num_blocks)
    return integers, scales, middles


def load_functions() -> None:
    """Compiles the functions, so that threads find them compiled."""
    _stepping(detect_target())
    _rounding(detect_target())


@functools.cache
def _stepping(target: Target) -> HostFunction:
    return HostFunction("levserve_step_blocks", target, 4, _write_stepping)


@functools.cache
def _rounding(target: Target) -> HostFunction:
    return HostFunction("levserve_round_around_middles", target, 5, _write_rounding)


def _write_stepping(builder: Builder) -> None:
    """Stores the scale of each block as float32, and its middle, which is a value that the block may have."""
    *pointers, count = builder.arguments
    rows, scales, middles = map(builder.to_pointer, pointers)
    with builder.loop(0, count) as block:
        values = load_block(builder, rows + block * BLOCK_BYTES)
        builder.store(scales + block * 4, builder.largest_magnitude(values).maximum(SMALLEST) / STEPS)
        step, smallest = find_step(builder, values, LEVELS)
        builder.store(middles + block * 4, step.full_like(0.0))
        with builder.when(step >= SMALLEST):
            # As near to 0 as a value of the block is, where float16 is the finest.
            below = (smallest * -1.0 / step).maximum(0.0).minimum(STEPS / 2)
            whole = below + ROUNDING_CONSTANT - ROUNDING_CONSTANT
            builder.store(scales + block * 4, step)
            builder.store(middles + block * 4, smallest + whole * step)


def _write_rounding(builder: Builder) -> None:
    """Stores the integers nearest to each block's numbers, less its middle, times its inverse scale."""
    *pointers, count = builder.arguments
    rows, inverses, middles, into = map(builder.to_pointer, pointers)
    with builder.loop(0, count) as block:
        inverse, middle = (
            builder.load(each + block * 4, F32).splat(lanes_of(builder)) for each in (inverses, middles)
        )
        for index, vector in enumerate(load_block(builder, rows + block * BLOCK_BYTES)):
            store_rounded(builder, (vector - middle) * inverse, into + block * BLOCK, index)
