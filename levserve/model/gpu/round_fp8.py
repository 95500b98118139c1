"""Rounds activations to FP8, together with the operation before, as Pallas kernels for NVIDIA GPUs.

XLA needs two kernels: one that finds the largest value of each group, and one that repeats the operation
before and rounds. Here it is one kernel. Values are first rounded to bfloat16, as they are where they are not
rounded to FP8.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.cache import FP8, LARGEST_FP8
from levserve.model.fp8_rows import SMALLEST, Fp8Rows, round_rows
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.paged_attention import power_of_two

MAX_WIDTH = 16384
"""The most values of a row that a program can have at once."""
PART = 1024
"""Values of a row that a program rounds, if nothing is computed from the whole row."""
NUMBERS_PER_WARP = 512


def find_group(num_inputs: int, columns: int | None) -> int | None:
    """How many inputs share a scale where a scheme has `columns`; None if these kernels do not round them."""
    if columns is None:
        return num_inputs if num_inputs <= MAX_WIDTH else None
    takes = columns <= PART and columns == power_of_two(columns) and num_inputs % columns == 0
    return columns if takes else None


def round_in_groups(x: jax.Array, columns: int | None, *, interpret: bool = False) -> Fp8Rows:
    """x [row, in] rounded with a scale for every so many inputs, or one for all, by a kernel if it can."""
    group = find_group(x.shape[1], columns)
    if group is None:
        return round_rows(x.astype(jnp.bfloat16), columns)
    return round_gated(x, gate=None, group=group, interpret=interpret)


def round_group(numbers: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Inside a kernel: values whose inputs lie along this axis and share a scale, as FP8 with the largest of
    each, which `LARGEST_FP8` stands for."""
    wide = numbers.astype(jnp.bfloat16).astype(jnp.float32)
    largest = jnp.maximum(jnp.abs(wide).max(axis), SMALLEST)
    factor = LARGEST_FP8 / largest
    return (wide * (factor[None, :] if axis == 0 else factor[:, None])).astype(FP8), largest


@functools.partial(jax.jit, static_argnames=("eps", "group", "interpret"))
def round_normed(
    x: jax.Array, weight: jax.Array, *, eps: float, group: int, interpret: bool = False
) -> Fp8Rows:
    """The RMS norm of x [row, in] with this weight, rounded."""
    num_rows, num_inputs = x.shape
    kernel = functools.partial(_norm_kernel, eps=eps, group=group)
    return _call(kernel, [x, weight], (num_rows,), (num_rows, num_inputs), group, num_inputs, interpret)


@functools.partial(jax.jit, static_argnames=("gate", "group", "interpret"))
def round_gated(x: jax.Array, *, gate: Gate | None, group: int, interpret: bool = False) -> Fp8Rows:
    """Rounds what the gate makes of x [row, in], or of x [row, 2 * in] if it is gated; without a gate, x."""
    num_rows, width = x.shape
    num_inputs = width // 2 if gate is not None and gate.is_gated else width
    part = max(group, math.gcd(PART, num_inputs))
    kernel = functools.partial(_gate_kernel, gate=gate, group=group, part=part)
    grid = (num_rows, num_inputs // part)
    return _call(kernel, [x], grid, (num_rows, num_inputs), group, part, interpret)


def _call(
    kernel: functools.partial[None],
    arrays: list[jax.Array],
    grid: tuple[int, ...],
    shape: tuple[int, int],
    group: int,
    width: int,
    interpret: bool,
) -> Fp8Rows:
    num_rows, num_inputs = shape
    num_warps = power_of_two(max(1, width // NUMBERS_PER_WARP))
    codes, largest = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=(
            jax.ShapeDtypeStruct(shape, FP8),
            jax.ShapeDtypeStruct((num_inputs // group, num_rows), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=min(16, num_warps), num_stages=1),
        interpret=interpret,
        name="round_fp8",
    )(*arrays)
    return Fp8Rows(codes, largest)


def _norm_kernel(
    x_ref: jax.Ref, weight_ref: jax.Ref, code_ref: jax.Ref, largest_ref: jax.Ref, *, eps: float, group: int
) -> None:
    row, num_inputs = pl.program_id(0), x_ref.shape[1]
    groups = jnp.arange(power_of_two(num_inputs // group), dtype=jnp.int32)
    at, mask = _places(groups, group, num_inputs)
    x = plgpu.load(x_ref.at[row, at], mask=mask, other=0.0).astype(jnp.float32)
    weight = plgpu.load(weight_ref.at[at], mask=mask, other=0.0)
    mean = jnp.sum(x * x) / num_inputs
    _store(x * lax.rsqrt(mean + eps) * weight, row, groups, group, code_ref, largest_ref)


def _gate_kernel(
    x_ref: jax.Ref, code_ref: jax.Ref, largest_ref: jax.Ref, *, gate: Gate | None, group: int, part: int
) -> None:
    row = pl.program_id(0)
    num_groups, num_inputs = part // group, code_ref.shape[1]
    groups = pl.program_id(1) * num_groups + jnp.arange(num_groups, dtype=jnp.int32)
    at, mask = _places(groups, group, num_inputs)
    starts = (0, num_inputs) if gate is not None and gate.is_gated else (0,)
    given = tuple(
        plgpu.load(x_ref.at[row, at + start], mask=mask, other=0.0).astype(jnp.float32) for start in starts
    )
    _store(given[0] if gate is None else gate.apply(given), row, groups, group, code_ref, largest_ref)


def _places(groups: jax.Array, group: int, num_inputs: int) -> tuple[jax.Array, jax.Array]:
    """Where the values [group, in] of these groups are in a row; the mask leaves out what pads both axes."""
    columns = jnp.arange(power_of_two(group), dtype=jnp.int32)
    at = groups[:, None] * group + columns[None, :]
    return at, (columns < group)[None, :] & (at < num_inputs)


def _store(
    numbers: jax.Array,
    row: jax.Array,
    groups: jax.Array,
    group: int,
    code_ref: jax.Ref,
    largest_ref: jax.Ref,
) -> None:
    """Rounds values [group, in] of these groups of a row and stores them."""
    codes, largest = round_group(numbers, 1)
    at, mask = _places(groups, group, code_ref.shape[1])
    plgpu.store(code_ref.at[row, at], codes, mask=mask)
    plgpu.store(largest_ref.at[groups, row], largest, mask=groups < largest_ref.shape[0])
