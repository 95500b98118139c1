"""Products with matrices of four or eight bits that are kept in lanes, by the kernel of `fragment_kernel` or,
for many rows on Hopper, by those of `wide_kernel` and `ring_kernel`."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from levserve.model.gpu.assembly import Kernel, launch
from levserve.model.gpu.fragment_kernel import Writer
from levserve.model.gpu.fragment_plan import FragmentTiling, Problem
from levserve.model.gpu.hopper import is_hopper
from levserve.model.gpu.ring_kernel import RingWriter, in_parts
from levserve.model.gpu.wide_kernel import WideWriter, in_fragments
from levserve.model.lanes import to_lanes, unit_of
from levserve.model.packed import Code, PackedMatrix, Scheme

log = logging.getLogger(__name__)

TRIAL = FragmentTiling(2, 1, 1, 1, 1, is_staged=False)
WIDE_TRIAL = FragmentTiling(2, 1, 4, 1, 1, is_staged=True, is_wide=True)
RING_TRIAL = FragmentTiling(2, 1, 8, 1, 1, is_staged=True, is_wide=True, has_ring=True)


@functools.partial(jax.jit, static_argnames="tiling")
def multiply_fragments(matrix: PackedMatrix, x: jax.Array, *, tiling: FragmentTiling) -> jax.Array:
    """x [row, in], rounded to bfloat16, times the matrix: float32 [row, out]."""
    num_rows, x = len(x), x.astype(jnp.bfloat16)
    if tiling.is_staged:
        x = jnp.pad(x, ((0, -num_rows % tiling.rows), (0, 0)))
    if tiling.has_ring:
        x = in_parts(x, matrix.scheme.code.is_nibble, tiling.rows)
    elif tiling.is_wide:
        x = in_fragments(x, matrix.scheme.code.is_nibble)
    parts = multiply_parts(matrix, x, tiling)
    # One by one: XLA would compile a sum over an axis to a separate kernel.
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
        tiling.max_registers,
    )


@functools.cache
def write_kernel(problem: Problem, tiling: FragmentTiling) -> Kernel:
    writer = RingWriter if tiling.has_ring else WideWriter if tiling.is_wide else Writer
    return writer(problem, tiling).write()


@functools.cache
def runs_here() -> bool:
    """Whether XLA accepts the kernels and their results are right; tries small products, once.

    The interface that hands them over is internal to XLA, so another version may not have it.
    """
    tilings = [TRIAL, WIDE_TRIAL, RING_TRIAL] if is_hopper() else [TRIAL]
    try:
        is_right = all(np.array_equal(*_try(tiling)) for tiling in tilings)
        reason = None if is_right else "its results are wrong"
    except Exception as error:  # whatever that version raises
        reason = str(error).splitlines()[0] if str(error) else repr(error)
    if reason is not None:
        log.warning(
            "the PTX kernel for 4- and 8-bit matrices cannot be used here (%s); a slower one is used", reason
        )
    return reason is None


def _try(tiling: FragmentTiling) -> tuple[jax.Array, np.ndarray]:
    """A product by the kernel, in one program, and the expected result; nothing is rounded."""
    num_inputs, num_outputs = unit_of(is_nibble=True), tiling.columns
    codes = (np.arange(num_outputs * num_inputs) % 13).astype(np.uint8).reshape(num_outputs, num_inputs)
    lanes = np.empty((num_outputs, num_inputs // 2), np.uint8)
    to_lanes(codes, True, lanes)
    scheme = Scheme(Code.UINT4, num_inputs, zero=8, in_lanes=True)
    scale = jnp.ones((1, num_outputs), scheme.scale)
    axes = (Axis("out", num_outputs), Axis("in", num_inputs))
    x = (np.arange(num_inputs) % 7 - 3).astype(np.float32)[None]
    matrix = PackedMatrix(jnp.asarray(lanes), scale, None, scheme, axes)
    return multiply_fragments(matrix, jnp.asarray(x), tiling=tiling), x @ (codes.astype(np.float32) - 8).T
