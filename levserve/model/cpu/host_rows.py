"""Rounds and multiplies rows of float32 matrices on a CPU when a model is loaded; called from Python.

Numpy would read and write the rows once for each step, and its matrix products start additional threads,
which spin while they wait for work.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from levserve.jit.builder import F32, I8, I32, ROUNDING_CONSTANT, Builder, Value
from levserve.jit.host_call import HostFunction
from levserve.jit.target import Target, detect_target
from levserve.model.cpu.rotation import rotate_block
from levserve.model.hadamard import block_size
from levserve.model.int8_packing import SMALLEST, STEPS

TILE_ROWS = 4
"""Rows of a matrix that are multiplied at a time."""
CHUNK = 1024
"""Inputs that are multiplied at a time: those of a tile's rows stay in the first-level cache."""

Floats = NDArray[np.float32]


def round_rows(rows: Floats, columns: Floats, into: NDArray[np.int8]) -> Floats:
    """Multiplies rows [out, in] by `columns` [in], rotates and rounds them to int8; gives their scales."""
    assert rows.flags.c_contiguous and columns.flags.c_contiguous and into.flags.c_contiguous
    count, size = rows.shape
    scales, scratch = np.empty(count, np.float32), np.empty(size, np.float32)
    _rounding(block_size(size), detect_target())(rows, columns, into, scales, scratch, count, size)
    return scales


def multiply_rows(tokens: Floats, rows: Floats) -> Floats:
    """`tokens @ rows.T`."""
    target = detect_target()
    (num_tokens, size), count = tokens.shape, len(rows)
    products = np.zeros((num_tokens, count), np.float32)
    whole = count - count % TILE_ROWS
    if size % target.lanes or num_tokens % _tile_tokens(target):
        whole = 0
    else:
        assert rows.flags.c_contiguous and tokens.flags.c_contiguous
        _product(target)(tokens, rows, products, num_tokens, whole, count, size)
    if whole < count:
        products[:, whole:] = tokens @ rows[whole:].T
    return products


def load_functions(size: int) -> None:
    """Compiles the functions for rows of this size, so that threads find them compiled."""
    _rounding(block_size(size), detect_target())
    _product(detect_target())


@functools.cache
def _rounding(block: int, target: Target) -> HostFunction:
    return HostFunction(
        f"levserve_round_rows_{block}", target, 7, functools.partial(_write_rounding, block=block)
    )


@functools.cache
def _product(target: Target) -> HostFunction:
    return HostFunction("levserve_multiply_rows", target, 7, _write_product)


def _write_rounding(builder: Builder, *, block: int) -> None:
    *pointers, count, size = builder.arguments
    rows, columns, into, scales, scratch = map(builder.to_pointer, pointers)
    lanes = min(builder.target.lanes, block)
    with builder.loop(0, count) as row:
        numbers = rows + row * size * 4
        maximum = builder.variable(builder.zeros(I32, lanes))
        with builder.loop(0, size // block) as index:
            offsets = [index * (4 * block) + 4 * at for at in range(0, block, lanes)]
            loaded = [
                builder.load(numbers + offset, F32, lanes) * builder.load(columns + offset, F32, lanes)
                for offset in offsets
            ]
            for offset, rotated in zip(offsets, rotate_block(loaded, lanes)):
                builder.store(scratch + offset, rotated)
                maximum.set(maximum.get().intrinsic("llvm.smax", rotated.magnitude()))
        norm = 1 / math.sqrt(block)
        largest = maximum.get().reduce_magnitudes().maximum(SMALLEST / norm)
        builder.store(scales + row * 4, largest * norm / STEPS)
        factor = (builder.constant(STEPS, F32) / largest).splat(block)
        with builder.loop(0, size // block) as index:
            rounded = builder.load(scratch + index * (4 * block), F32, block) * factor + ROUNDING_CONSTANT
            integers = rounded.convert("bitcast", I32).convert("trunc", I8)
            builder.store(into + row * size + index * block, integers)


def _tile_tokens(target: Target) -> int:
    """Tokens that are multiplied at a time: as many as registers can hold the sums of."""
    return 2 if target.arch == "x86_64" and target.vector_bytes < 64 else 4


def _write_product(builder: Builder) -> None:
    """Adds the products of every chunk to those in memory, which start as zeros."""
    *pointers, num_tokens, num_rows, stride, size = builder.arguments
    tokens, rows, products = map(builder.to_pointer, pointers)
    tile_tokens = _tile_tokens(builder.target)
    with builder.loop(0, num_rows, TILE_ROWS) as row, builder.loop(0, size, CHUNK) as start:
        chunk = start, (start + CHUNK).minimum(size)
        of_rows = [rows + (row + index) * size * 4 for index in range(TILE_ROWS)]
        with builder.loop(0, num_tokens, tile_tokens) as token:
            of_tokens = [tokens + (token + index) * size * 4 for index in range(tile_tokens)]
            for index, added in enumerate(_multiply_tile(builder, of_tokens, of_rows, chunk)):
                place = products + ((token + index) * stride + row) * 4
                builder.store(place, builder.load(place, F32, TILE_ROWS) + added)


def _multiply_tile(
    builder: Builder, tokens: list[Value], rows: list[Value], chunk: tuple[Value, Value]
) -> list[Value]:
    """For each token a vector of its products with the rows."""
    lanes = builder.target.lanes
    sums = [[builder.variable(builder.zeros(F32, lanes)) for _ in rows] for _ in tokens]
    with builder.loop(*chunk, lanes) as at:
        matrix = [builder.load(row + at * 4, F32, lanes) for row in rows]
        for token, of_token in zip(tokens, sums):
            numbers = builder.load(token + at * 4, F32, lanes)
            for weights, total in zip(matrix, of_token):
                total.set(weights.multiply_add(numbers, total.get()))
    return [builder.reduce_sums(*(total.get() for total in of_token)) for of_token in sums]
