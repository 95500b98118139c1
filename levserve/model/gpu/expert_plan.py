"""How the products of experts are tiled on an NVIDIA GPU; measured on an H200 with Qwen3-30B-A3B's shape."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from levserve.model.backend import ExpertMatrix, ExpertRule
from levserve.model.config import Activation
from levserve.model.gpu.expert_memory import bytes_needed
from levserve.model.gpu.fp8_dot import has_dot_fp8
from levserve.model.gpu.fp8_plan import SMALLEST_DEPTH
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.packed_plan import piece_width
from levserve.model.gpu.shared_memory import has_measured_memory, most_stages
from levserve.model.packed import PackedMatrix, Scheme

FEW_TOKENS = 16
"""With up to this many tokens, a tile has all of them, whatever their experts are."""
SMALLEST = 16
"""Rows, columns and depth of the smallest product a tensor core takes."""
MAX_ELEMENTS = 1 << 31
"""Elements of all experts' matrices together that a kernel's 32-bit indices can reach."""

Stored = tuple[Scheme | None, tuple[int, ...]]
"""The scheme of packed matrices, and their shape."""


@dataclass(frozen=True, slots=True)
class Tiling:
    columns: int
    """Columns of the result that a program computes."""
    depth: int
    """Elements of a row that are multiplied in one step."""
    num_warps: int
    num_stages: int
    is_matrix_first: bool = False
    """Whether the matrix is the left factor of the product and the tokens are the right one. In Hopper's
    larger instructions the left one has at least 64 rows, but the right one may have only 8 columns."""
    multiplies_fp8: bool = False
    """Whether an FP8 matrix is multiplied with rows of FP8 as it is, not widened."""

    def fit(self, width: int, depth: int) -> Tiling:
        return replace(self, columns=math.gcd(self.columns, width), depth=math.gcd(self.depth, depth))


@dataclass(frozen=True, slots=True)
class Plan:
    size: int
    """Pairs of a token and an expert in a tile."""
    gate_up: Tiling
    down: Tiling
    halvings: int = 0
    """How many times a tile may be halved if at most half of it is full. All sizes must use the same
    instructions, so that a token's result does not depend on how many others have its expert."""
    rounds: bool = False
    """Whether results are rounded to the matrices' type before they are summed."""
    is_gated: bool = True
    activation: Activation = Activation.SILU
    gate_limit: float | None = None
    up_offset: float = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of a tile and its halves, the largest first."""
        return tuple(self.size >> halving for halving in range(self.halvings + 1))

    @property
    def gate(self) -> Gate:
        return Gate(self.activation, self.is_gated, self.gate_limit, self.up_offset)

    def ends_in_fp8(self, down: ExpertMatrix) -> bool:
        """Whether the first product's kernel rounds the hidden values, which needs a whole group of them."""
        if not (self.down.multiplies_fp8 and isinstance(down, PackedMatrix)):
            return False
        return self.gate_up.columns == down.scheme.columns


FEW = Plan(16, Tiling(64, 128, 4, 4, is_matrix_first=True), Tiling(128, 128, 4, 3))
BY_SHARE = {
    6: Plan(16, Tiling(64, 128, 4, 3, is_matrix_first=True), Tiling(256, 128, 8, 2)),
    24: Plan(32, Tiling(64, 64, 4, 5, is_matrix_first=True), Tiling(128, 128, 4, 3), halvings=1),
    48: Plan(64, Tiling(128, 64, 4, 4), Tiling(256, 64, 4, 4)),
    math.inf: Plan(128, Tiling(128, 64, 8, 4), Tiling(256, 64, 8, 4), halvings=1),
}
"""Plans by the largest mean number of pairs per expert that they serve."""
UNGATED = Tiling(128, 64, 8, 3)
"""For many pairs without a gate: two such programs fit on a processor, so that one multiplies while the other
computes activations. With one more stage only one fits, and the product takes almost 1.5 times as long in the
shape of AI-OS's English-v1."""
WIDE_BY_SHARE = {
    24: Plan(16, Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2)),
    math.inf: Plan(64, Tiling(64, 32, 4, 3), Tiling(64, 32, 4, 3)),
}
"""The same for float32."""
MANY_TOKENS = 1024
"""From this many tokens on, results of bfloat16 experts are rounded to bfloat16: besides the matrices,
they are most of what is written and read. A layer of Qwen3-30B-A3B then differs from one in float32 by
5.2e-4 of the largest value, not 1.7e-4."""

PACKED = functools.partial(Tiling, is_matrix_first=True)
NIBBLES_FEW = Plan(16, PACKED(64, 128, 2, 3), PACKED(64, 128, 2, 3))
BYTES_FEW = Plan(16, PACKED(64, 128, 4, 3), PACKED(128, 128, 4, 3))
NIBBLES_BY_SHARE = {
    6: Plan(16, PACKED(64, 128, 2, 3), PACKED(128, 128, 4, 3)),
    24: Plan(32, PACKED(128, 64, 4, 3), PACKED(128, 128, 4, 3), halvings=1),
    48: Plan(64, PACKED(64, 64, 4, 3), PACKED(128, 64, 4, 3)),
    math.inf: Plan(128, PACKED(64, 64, 4, 2), PACKED(128, 64, 8, 3), halvings=1),
}
"""The same where a matrix is packed, measured with groups of 128. The depth is in bytes, and the matrix is
always the first factor."""
SMALL_GROUPS_FEW = Plan(16, PACKED(32, 64, 2, 3), PACKED(64, 64, 4, 3))
SMALL_GROUPS_BY_SHARE = NIBBLES_BY_SHARE | {6: Plan(16, PACKED(32, 64, 1, 3), PACKED(128, 64, 4, 3))}
"""The same with groups of 32, as GGUF's and MXFP4's. A program with fewer columns than threads loads scales
where they are used; in others they pass through shared memory, where one warp waits for no other."""
BYTES_BY_SHARE = NIBBLES_BY_SHARE | {
    6: BYTES_FEW,
    24: Plan(32, PACKED(64, 128, 4, 3), PACKED(128, 128, 4, 3), halvings=1),
}
AS_FP8 = functools.partial(PACKED, multiplies_fp8=True)
FP8_FEW = Plan(16, AS_FP8(128, 256, 4, 3), AS_FP8(64, 128, 4, 3))
FP8_BY_SHARE = {
    6: Plan(16, AS_FP8(128, 128, 4, 3), AS_FP8(128, 128, 8, 3)),
    24: Plan(32, AS_FP8(128, 128, 4, 3), AS_FP8(128, 128, 4, 3), halvings=1),
    48: Plan(64, AS_FP8(128, 128, 8, 3), AS_FP8(128, 128, 4, 3)),
    math.inf: Plan(64, AS_FP8(128, 128, 8, 3), AS_FP8(128, 128, 4, 3)),
}
"""Where matrices and activations are FP8 and multiplied so."""
PACKED_PLANS = {True: (NIBBLES_FEW, NIBBLES_BY_SHARE), False: (BYTES_FEW, BYTES_BY_SHARE)}
"""By whether two codes share a byte: the plan for few tokens, and the others."""
MAX_PIECES = 2
"""The most pieces of a packed matrix in one step: of groups of 32, four were no faster and twice as long to
compile."""

WIDENED_FROM = 48
"""With more pairs per expert than this in the mean, packed matrices with small groups are widened in memory,
a layer at a time: kernels apply a scale for every 32 inputs too slowly for prompts."""
SMALL_GROUP = 64
MAX_WIDENED_BYTES = 4 << 30
"""A larger layer is not widened."""


def shape_of(matrix: ExpertMatrix) -> tuple[int, int, int]:
    """Experts, rows and inputs of the matrices."""
    num_experts, num_rows, num_inputs = (
        tuple(axis.size for axis in matrix.axes) if isinstance(matrix, PackedMatrix) else matrix.shape
    )
    return num_experts, num_rows, num_inputs


def choose_plan(
    num_tokens: int, rule: ExpertRule, gate_up: ExpertMatrix, down: ExpertMatrix, dtype: jnp.dtype
) -> Plan | None:
    """How to tile the products in this type, or None if the kernels do not serve these experts."""
    schemes = [matrix.scheme for matrix in (gate_up, down) if isinstance(matrix, PackedMatrix)]
    plan = _find_plan(num_tokens, rule, dtype, schemes)
    _, embed, mlp = shape_of(down)
    of_gate_up = _fit(plan.gate_up, gate_up, mlp, dtype)
    of_down = _fit(plan.down, down, embed, dtype)
    if of_gate_up is None or of_down is None:
        return None
    return replace(
        plan,
        gate_up=_fit_memory(of_gate_up, gate_up, plan.size, 2 if rule.is_gated else 1),
        down=_fit_memory(of_down, down, plan.size, 1),
        rounds=num_tokens >= MANY_TOKENS and dtype == jnp.bfloat16,
        is_gated=rule.is_gated,
        activation=rule.activation,
        gate_limit=rule.gate_limit,
        up_offset=rule.up_offset,
    )


def bytes_to_widen(gate_up: Stored, down: Stored) -> int:
    """The memory in which the matrices of a layer are widened for prompts; 0 if they are not."""
    sizes = [2 * math.prod(shape) for scheme, shape in (gate_up, down) if _has_small_groups(scheme)]
    return sum(sizes) if sum(sizes) <= MAX_WIDENED_BYTES else 0


def stored(matrix: ExpertMatrix) -> Stored:
    return matrix.scheme if isinstance(matrix, PackedMatrix) else None, shape_of(matrix)


def _has_small_groups(scheme: Scheme | None) -> bool:
    """Not if activations are rounded too, which only the kernels do."""
    if scheme is None or scheme.columns is None or scheme.rounds_rows:
        return False
    return scheme.columns < SMALL_GROUP


def takes_packed(scheme: Scheme, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Whether the kernels multiply with packed matrices [expert, out, in] of this shape, in this type."""
    num_columns = shape[1]
    # The matrix may be that of the gate and up, whose halves are tiled separately. For the other matrix, as
    # wide as the model, this asks for more than the kernels need, but for no more than models have.
    if num_columns % (2 * SMALLEST):
        return False
    plans = [*NIBBLES_BY_SHARE.values(), *BYTES_BY_SHARE.values()]
    tilings = [tiling for plan in plans for tiling in (plan.gate_up, plan.down)]
    return all(_fit_packed(tiling, scheme, shape, num_columns, dtype) is not None for tiling in tilings)


def _find_plan(num_tokens: int, rule: ExpertRule, dtype: jnp.dtype, schemes: Sequence[Scheme]) -> Plan:
    """`schemes` are those of packed matrices."""
    if any(scheme.rounds_rows for scheme in schemes) and has_dot_fp8():
        few, by_share = FP8_FEW, FP8_BY_SHARE
    elif schemes and schemes[0].code.is_nibble and _has_small_groups(schemes[0]):
        few, by_share = SMALL_GROUPS_FEW, SMALL_GROUPS_BY_SHARE
    elif schemes:
        few, by_share = PACKED_PLANS[schemes[0].code.is_nibble]
    elif dtype == jnp.float32:
        few, by_share = WIDE_BY_SHARE[24], WIDE_BY_SHARE
    else:
        few, by_share = FEW, BY_SHARE
    if num_tokens <= FEW_TOKENS:
        return few
    share = num_tokens * rule.per_token / rule.num_experts
    plan = next(plan for most, plan in by_share.items() if share <= most)
    if not rule.is_gated and plan is BY_SHARE[math.inf]:
        return replace(plan, gate_up=UNGATED)
    return plan


def _fit(tiling: Tiling, matrix: ExpertMatrix, num_columns: int, dtype: jnp.dtype) -> Tiling | None:
    """The tiling for results of `num_columns` columns; None if the matrix cannot be tiled."""
    if isinstance(matrix, PackedMatrix):
        return _fit_packed(tiling, matrix.scheme, shape_of(matrix), num_columns, dtype)
    fitted = tiling.fit(num_columns, matrix.shape[2])
    is_tiled = matrix.size < MAX_ELEMENTS and min(fitted.columns, fitted.depth) >= SMALLEST
    has_type = dtype == matrix.dtype and dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    return fitted if is_tiled and has_type else None


def _fit_packed(
    tiling: Tiling, scheme: Scheme, shape: tuple[int, ...], num_columns: int, dtype: jnp.dtype
) -> Tiling | None:
    codes, _ = scheme.array_shapes(shape)[""]
    fitted = tiling.fit(num_columns, codes[2])
    piece = piece_width(fitted.depth, scheme, codes[2])
    fitted = replace(fitted, depth=min(fitted.depth, MAX_PIECES * piece))
    if not scheme.rounds_rows or piece < SMALLEST_DEPTH:
        fitted = replace(fitted, multiplies_fp8=False)
    is_tiled = math.prod(codes) < MAX_ELEMENTS and min(fitted.columns, piece) >= SMALLEST
    return fitted if is_tiled and dtype == jnp.bfloat16 and not scheme.in_lanes else None


def _fit_memory(tiling: Tiling, matrix: ExpertMatrix, num_pairs: int, tiles: int) -> Tiling:
    """The tiling with as many stages as the card's shared memory has room for, or with less depth."""
    while not has_measured_memory():
        needed = bytes_needed(
            matrix, tiles=tiles, columns=tiling.columns, depth=tiling.depth, num_pairs=num_pairs
        )
        num_stages = most_stages(tiling.num_stages, needed.step, needed.other)
        if num_stages is not None:
            return replace(tiling, num_stages=num_stages)
        if tiling.depth == SMALLEST:
            break
        tiling = replace(tiling, depth=tiling.depth // 2)
    return tiling
