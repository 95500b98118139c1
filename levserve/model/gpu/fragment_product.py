"""Products with matrices of four or eight bits that are kept in lanes, by the kernel of `fragment_kernel`."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from levserve.model.gpu.assembly import launch
from levserve.model.gpu.fragment_kernel import Writer
from levserve.model.gpu.fragment_plan import SMALLEST, FragmentTiling, Problem
from levserve.model.lanes import to_lanes, unit_of
from levserve.model.packed import Code, PackedMatrix, Scheme

log = logging.getLogger(__name__)


@functools.partial(jax.jit, static_argnames="tiling")
def multiply_fragments(matrix: PackedMatrix, x: jax.Array, *, tiling: FragmentTiling) -> jax.Array:
    """x [row, in], rounded to bfloat16, times the matrix: float32 [row, out]."""
    num_rows, x = len(x), x.astype(jnp.bfloat16)
    if tiling.is_staged:
        x = jnp.pad(x, ((0, -num_rows % tiling.rows), (0, 0)))
    parts = multiply_parts(matrix, x, tiling)
    # One by one: XLA would compile a sum over an axis to a kernel of its own.
    total = functools.reduce(jnp.add, (parts[number] for number in range(tiling.splits)))
    return total[:num_rows]


def multiply_parts(matrix: PackedMatrix, x: jax.Array, tiling: FragmentTiling) -> jax.Array:
    """The sums of each split: float32 [split, row, out]."""
    num_columns, num_inputs = (axis.size for axis in matrix.axes)
    problem = Problem(len(x), num_columns, num_inputs, matrix.scheme)
    arrays = (x, matrix.codes, matrix.scale, matrix.zero, matrix.offset)
    return launch(
        "fragment_product",
        write_kernel(problem, tiling),
        [array for array in arrays if array is not None],
        jax.ShapeDtypeStruct((tiling.splits, len(x), num_columns), jnp.float32),
        (-(-len(x) // tiling.rows), num_columns // tiling.columns, tiling.splits),
        tiling.num_warps,
    )


@functools.cache
def write_kernel(problem: Problem, tiling: FragmentTiling) -> str:
    return Writer(problem, tiling).write()


@functools.cache
def runs_here() -> bool:
    """Whether XLA takes the kernel and gets the right numbers from it; the smallest product is tried, once.

    The way in which it is handed over is XLA's own, so another version of it may not have it.
    """
    try:
        reason = None if np.array_equal(*_try_smallest()) else "its numbers are wrong"
    except Exception as error:  # whatever that version raises
        reason = str(error).splitlines()[0] if str(error) else repr(error)
    if reason is not None:
        log.warning(
            "the kernel for matrices of four and eight bits does not run here, others will: %s", reason
        )
    return reason is None


def _try_smallest() -> tuple[jax.Array, np.ndarray]:
    """A product by the kernel, and what it is."""
    num_inputs = unit_of(is_nibble=True)
    codes = (np.arange(SMALLEST * num_inputs) % 13).astype(np.uint8).reshape(SMALLEST, num_inputs)
    lanes = np.empty((SMALLEST, num_inputs // 2), np.uint8)
    to_lanes(codes, True, lanes)
    scheme = Scheme(Code.UINT4, num_inputs, zero=8, in_lanes=True)
    scale = jnp.ones((1, SMALLEST), scheme.scale)
    axes = (Axis("out", SMALLEST), Axis("in", num_inputs))
    x = (np.arange(num_inputs) % 7 - 3).astype(np.float32)[None]
    tiling = FragmentTiling(2, 1, 1, 1, 1, is_staged=False)
    matrix = PackedMatrix(jnp.asarray(lanes), scale, None, scheme, axes)
    return multiply_fragments(matrix, jnp.asarray(x), tiling=tiling), x @ (codes.astype(np.float32) - 8).T
