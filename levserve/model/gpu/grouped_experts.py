"""The experts' products as two Pallas kernels for NVIDIA GPUs: up and activation, then down and weighting.

Every program of a grid takes one tile of pairs of a token and an expert (see `expert_tiles`) and some columns
of the result. Only matrices of experts that have a pair are read; packed ones are widened in registers (see
`packed_columns`). Results are kept per pair, so that the sum over a token's experts is always computed in the
same order.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.backend import ExpertChoice, ExpertMatrix
from levserve.model.gpu.expert_plan import FEW_TOKENS, Plan, Tiling, shape_of
from levserve.model.gpu.expert_tiles import Tiles, tile_pairs
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.packed_columns import Blocks, PackedColumns, arrays_of
from levserve.model.gpu.packed_plan import piece_width
from levserve.model.gpu.paged_attention import power_of_two
from levserve.model.gpu.split_product import sum_pieces
from levserve.model.packed import PackedMatrix, Scheme, round_as_asked

FLOAT32_PRECISION = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
"""Three tensor-core products that together lose almost nothing and are four to seven times as fast as one
exact product without tensor cores."""


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def mix_grouped(
    x: jax.Array,
    choice: ExpertChoice,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    biases: tuple[jax.Array, jax.Array] | None = None,
    *,
    plan: Plan,
    interpret: bool = False,
) -> jax.Array:
    """The weighted sum of each token's experts, float32 [token, embed].

    x [token, embed], gate_up [expert, mlp, embed], or 2 * mlp with a gate, and down [expert, embed, mlp] have
    one type; beside a packed matrix the rest is bfloat16. The `biases` of both are float32 [expert, column].
    A token with the number of experts in place of its experts is padding; its result is undefined.
    """
    num_tokens, per_token = choice.experts.shape
    pairs, experts = choice.experts, choice.experts.reshape(-1)
    if num_tokens > FEW_TOKENS:
        num_experts, _, _ = shape_of(gate_up)
        tiles = tile_pairs(choice.experts, num_experts, plan.size, interpret=interpret)
        pairs, experts = tiles.pairs, tiles.experts
    multiply = functools.partial(
        _multiply,
        pairs=pairs,
        experts=experts,
        sizes=plan.sizes,
        per_token=per_token,
        num_tokens=num_tokens,
        interpret=interpret,
    )
    up_bias, down_bias = biases or (None, None)
    x = _rounded(x, gate_up)
    hidden = multiply(x, gate_up, up_bias, tiling=plan.gate_up, dtype=x.dtype, gate=plan.gate)
    hidden = _rounded(hidden, down)
    dtype = x.dtype if plan.rounds else jnp.dtype(jnp.float32)
    weights = choice.weights.reshape(-1)
    results = multiply(hidden, down, down_bias, tiling=plan.down, weights=weights, dtype=dtype)
    results = results[:-1].reshape(num_tokens, per_token, -1)
    # One by one: XLA would compile a sum over an axis to a separate kernel.
    return functools.reduce(jnp.add, (results[:, place].astype(jnp.float32) for place in range(per_token)))


def _rounded(rows: jax.Array, matrix: ExpertMatrix) -> jax.Array:
    return round_as_asked(rows, matrix.scheme) if isinstance(matrix, PackedMatrix) else rows


def hidden_in_tiles(
    x: jax.Array, tiles: Tiles, gate_up: jax.Array, num_pairs: int, *, plan: Plan, interpret: bool = False
) -> jax.Array:
    """The hidden values of the pairs of many tokens, in the order of the tiles. They are undefined where a
    tile has no pair."""
    num_tokens = len(x)
    return _multiply(
        x,
        gate_up,
        None,
        dtype=x.dtype,
        pairs=tiles.pairs,
        experts=tiles.experts,
        sizes=plan.sizes,
        tiling=plan.gate_up,
        num_tokens=num_tokens,
        per_token=num_pairs // num_tokens,
        interpret=interpret,
        gate=plan.gate,
        in_tiles=True,
    )


def _multiply(
    rows: jax.Array,
    matrices: ExpertMatrix,
    biases: jax.Array | None,
    *,
    weights: jax.Array | None = None,
    dtype: jnp.dtype,
    pairs: jax.Array,
    experts: jax.Array,
    sizes: tuple[int, ...],
    tiling: Tiling,
    num_tokens: int,
    per_token: int,
    interpret: bool,
    gate: Gate | None = None,
    in_tiles: bool = False,
) -> jax.Array:
    """Without `weights`, the hidden values of each pair from its token's row; with them, the weighted
    result of each pair from its own row. Results are in the order of the pairs, with one extra row whose
    number stands for the pairs that a tile lacks; or, if `in_tiles`, in the order of the tiles."""
    shape = shape_of(matrices)
    width = shape[1] // (2 if gate is not None and gate.is_gated else 1)
    scheme = None
    if isinstance(matrices, PackedMatrix):
        scheme, parts = matrices.scheme, arrays_of(matrices)
        if scheme.has_offsets:
            piece = piece_width(tiling.depth, scheme, matrices.codes.shape[2])
            parts.append(rows.reshape(len(rows), -1, piece).sum(-1, dtype=jnp.float32))
    else:
        parts = [matrices]
    arrays = [rows, *parts, pairs, experts]
    arrays += [array for array in (biases, weights) if array is not None]
    num_results = len(experts) * sizes[0] if in_tiles else num_tokens * per_token + 1
    out = jax.ShapeDtypeStruct((num_results, width), dtype)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            num_parts=len(parts),
            shape=shape,
            scheme=scheme,
            num_tokens=num_tokens,
            per_token=per_token,
            sizes=sizes,
            tiling=tiling,
            has_biases=biases is not None,
            gate=gate,
            in_tiles=in_tiles,
            interpret=interpret,
        ),
        grid=(width // tiling.columns, len(experts)),
        in_specs=[pl.BlockSpec(array.shape, functools.partial(_whole, array.ndim)) for array in arrays],
        out_specs=pl.BlockSpec(out.shape, functools.partial(_whole, 2)),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="experts_up" if weights is None else "experts_down",
    )(*arrays)


def _whole(num_dims: int, *program: jax.Array) -> tuple[int, ...]:
    return (0,) * num_dims


def _kernel(
    row_ref: jax.Ref,
    *refs: jax.Ref,
    num_parts: int,
    shape: tuple[int, int, int],
    scheme: Scheme | None,
    num_tokens: int,
    per_token: int,
    sizes: tuple[int, ...],
    tiling: Tiling,
    has_biases: bool,
    gate: Gate | None,
    in_tiles: bool,
    interpret: bool,
) -> None:
    matrix_refs, (pair_ref, expert_ref, *rest) = refs[:num_parts], refs[num_parts:]
    bias_refs, (*weight_refs, out_ref) = rest[:has_biases], rest[has_biases:]
    num_experts, num_rows, _ = shape
    is_gated = gate is not None and gate.is_gated
    num_pairs = num_tokens * per_token
    first_column, tile = pl.program_id(0) * tiling.columns, pl.program_id(1)
    expert = expert_ref[tile]
    is_used = expert < num_experts
    starts = (first_column, first_column + num_rows // 2) if is_gated else (first_column,)

    def across(numbers: jax.Array) -> jax.Array:
        """One value per pair, broadcast over the columns of the result."""
        return numbers[None, :] if tiling.is_matrix_first else numbers[:, None]

    def along(numbers: jax.Array) -> jax.Array:
        """One value per column of the result, broadcast over the pairs."""
        return numbers[:, None] if tiling.is_matrix_first else numbers[None, :]

    def compute(pairs: jax.Array) -> None:
        known = jnp.minimum(pairs, num_pairs - 1)
        at = known if weight_refs else known // per_token
        if scheme is None:
            (matrix_ref,) = matrix_refs
            results = _sum_products(row_ref, matrix_ref, at, expert, starts, tiling, interpret)
        else:
            results = _sum_packed(row_ref, matrix_refs, scheme, at, expert, starts, tiling, interpret)
        columns, is_pair = first_column + jnp.arange(tiling.columns, dtype=jnp.int32), pairs < num_pairs
        if bias_refs:
            results = tuple(
                result + along(bias_refs[0][expert, pl.ds(start, tiling.columns)])
                for result, start in zip(results, starts, strict=True)
            )
        result = results[0] if gate is None else gate.apply(results)
        if weight_refs:
            result = result * across(plgpu.load(weight_refs[0].at[known]))
        of_columns = along(columns)
        mask = jnp.broadcast_to(across(is_pair), result.shape)
        to = tile * sizes[0] + jnp.arange(len(pairs), dtype=jnp.int32) if in_tiles else pairs
        plgpu.store(out_ref.at[across(to), of_columns], result.astype(out_ref.dtype), mask=mask)

    def compute_first(size: int) -> None:
        compute(pair_ref[tile, pl.ds(0, size)])

    if num_tokens <= FEW_TOKENS:
        pairs = _pairs_of(expert, pair_ref, sizes[0])
        # The program of an expert's first pair computes all pairs of that expert.
        pl.when(is_used & (pairs.min() == tile))(functools.partial(compute, pairs))
        return
    for size, half in zip(sizes, (*sizes[1:], 0), strict=True):
        is_size = is_used if size == sizes[0] else is_used & (pair_ref[tile, size] == num_pairs)
        if half:
            is_size &= pair_ref[tile, half] < num_pairs
        pl.when(is_size)(functools.partial(compute_first, size))


def _pairs_of(expert: jax.Array, pair_ref: jax.Ref, size: int) -> jax.Array:
    """For a tile of all tokens: each token's pair with this expert; the number of pairs if it has none."""
    num_tokens, per_token = pair_ref.shape
    token, place = (lax.broadcasted_iota(jnp.int32, (size, power_of_two(per_token)), axis) for axis in (0, 1))
    is_there = (token < num_tokens) & (place < per_token)
    experts = plgpu.load(pair_ref.at[token, place], mask=is_there, other=-1)
    return jnp.where(experts == expert, token * per_token + place, num_tokens * per_token).min(1)


def _sum_products(
    row_ref: jax.Ref,
    matrix_ref: jax.Ref,
    at: jax.Array,
    expert: jax.Array,
    starts: tuple[jax.Array, ...],
    tiling: Tiling,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Rows `at` times the expert's columns from each start on, in float32."""
    depth = matrix_ref.shape[2]
    precision = None
    if row_ref.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if interpret else FLOAT32_PRECISION

    def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = index * tiling.depth
        numbers = first + jnp.arange(tiling.depth, dtype=jnp.int32)
        rows = plgpu.load(row_ref.at[at[:, None], numbers[None, :]])
        added = []
        for start in starts:
            matrix = matrix_ref[expert, pl.ds(start, tiling.columns), pl.ds(first, tiling.depth)]
            left, right = (matrix, rows) if tiling.is_matrix_first else (rows, matrix)
            added.append(plgpu.dot(left, right.T, precision=precision))
        return tuple(total + product for total, product in zip(sums, added, strict=True))

    shape = (tiling.columns, len(at)) if tiling.is_matrix_first else (len(at), tiling.columns)
    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in starts)
    return lax.fori_loop(0, depth // tiling.depth, step, zeros)


def _sum_packed(
    row_ref: jax.Ref,
    matrix_refs: tuple[jax.Ref, ...],
    scheme: Scheme,
    at: jax.Array,
    expert: jax.Array,
    starts: tuple[jax.Array, ...],
    tiling: Tiling,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The same with a packed matrix, which is always the left factor. If it has offsets, the last reference
    is to the sums of the rows, [row, piece]."""
    assert tiling.is_matrix_first
    width = matrix_refs[0].shape[2]
    piece = piece_width(tiling.depth, scheme, width)
    matrix_refs, sum_refs = (matrix_refs[:-1], matrix_refs[-1:]) if scheme.has_offsets else (matrix_refs, ())
    matrices = [
        PackedColumns(
            matrix_refs,
            scheme,
            start,
            tiling.columns,
            piece,
            tiling.num_warps,
            at=(expert,),
            interpret=interpret,
        )
        for start in starts
    ]

    def load_rows(inputs: jax.Array) -> jax.Array:
        return plgpu.load(row_ref.at[at[:, None], inputs[None, :]])

    def load_blocks(first: jax.Array) -> tuple[Blocks, ...]:
        return tuple(matrix.load_blocks(first) for matrix in matrices)

    def add_piece(
        first: jax.Array, blocks: tuple[Blocks, ...], totals: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        rows = [load_rows(inputs) for inputs in matrices[0].inputs_of(first)]
        starts = matrices[0].starts_of(first)
        sums = [plgpu.load(ref.at[at, start // piece]) for ref in sum_refs for start in starts]
        given = zip(matrices, blocks, totals, strict=True)
        return tuple(
            matrix.add_piece(first, of_piece, rows, total, sums) for matrix, of_piece, total in given
        )

    zeros = tuple(jnp.zeros((tiling.columns, len(at)), jnp.float32) for _ in starts)
    totals = sum_pieces(load_blocks, add_piece, zeros, width=width, piece=piece, depth=tiling.depth)
    return tuple(matrix.finish(total) for matrix, total in zip(matrices, totals, strict=True))
