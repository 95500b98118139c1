"""The experts' products as two Pallas kernels for NVIDIA GPUs: up and activation, then down and weighting.

Every program of a grid takes one tile of pairs of a token and an expert (see `expert_tiles`) and some columns
of the result. Only matrices of experts that have a pair are read; packed ones are widened in registers, or
multiplied as FP8 if the tokens' values are rounded to that too (see `packed_columns`). Results are kept per
pair, so that the sum over a token's experts is always computed in the same order.
"""

from __future__ import annotations

import functools
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.backend import ExpertChoice, ExpertMatrix
from levserve.model.cache import FP8
from levserve.model.fp8_rows import Fp8Rows
from levserve.model.gpu.expert_plan import FEW_TOKENS, Plan, Tiling, shape_of
from levserve.model.gpu.expert_tiles import Tiles, tile_pairs
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.packed_columns import Blocks, PackedColumns, arrays_of
from levserve.model.gpu.packed_plan import piece_width
from levserve.model.gpu.paged_attention import power_of_two
from levserve.model.gpu.round_fp8 import round_group, round_in_groups
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
    dtype = x.dtype if plan.rounds else jnp.dtype(jnp.float32)
    weights = choice.weights.reshape(-1)
    rows = _rounded(x, gate_up, plan.gate_up, interpret)
    ends_in_fp8 = plan.ends_in_fp8(down)
    found = multiply(
        rows, gate_up, up_bias, tiling=plan.gate_up, dtype=x.dtype, gate=plan.gate, ends_in_fp8=ends_in_fp8
    )
    hidden = Fp8Rows(*found) if ends_in_fp8 else _rounded(found[0], down, plan.down, interpret)
    (results,) = multiply(hidden, down, down_bias, tiling=plan.down, weights=weights, dtype=dtype)
    results = results[:-1].reshape(num_tokens, per_token, -1)
    # One by one: XLA would compile a sum over an axis to a separate kernel.
    return functools.reduce(jnp.add, (results[:, place].astype(jnp.float32) for place in range(per_token)))


def _rounded(rows: jax.Array, matrix: ExpertMatrix, tiling: Tiling, interpret: bool) -> jax.Array | Fp8Rows:
    """The rows as the kernel takes them."""
    if not isinstance(matrix, PackedMatrix):
        return rows
    if tiling.multiplies_fp8:
        return round_in_groups(rows, matrix.scheme.columns, interpret=interpret)
    return round_as_asked(rows, matrix.scheme)


def hidden_in_tiles(
    x: jax.Array, tiles: Tiles, gate_up: jax.Array, num_pairs: int, *, plan: Plan, interpret: bool = False
) -> jax.Array:
    """The hidden values of the pairs of many tokens, in the order of the tiles. They are undefined where a
    tile has no pair."""
    num_tokens = len(x)
    (hidden,) = _multiply(
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
    return hidden


Each = TypeVar("Each")


class Rows(NamedTuple, Generic[Each]):
    """What a kernel multiplies with the matrices, as arrays or as references to them."""

    values: Each
    """[row, in]; FP8 if they were rounded beforehand."""
    largest: Each | None = None
    """float32 [group, row], see `Fp8Rows`."""
    sums: Each | None = None
    """float32 [row, piece]: the sums of a packed matrix's pieces, if the matrix has offsets."""


def _multiply(
    given: jax.Array | Fp8Rows,
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
    ends_in_fp8: bool = False,
) -> tuple[jax.Array, ...]:
    """Without `weights`, the hidden values of each pair from its token's row; with them, the weighted
    result of each pair from its own row. Results are in the order of the pairs, with one extra row whose
    number stands for the pairs that a tile lacks; or, if `in_tiles`, in the order of the tiles. If the kernel
    `ends_in_fp8`, they are the arrays of `Fp8Rows`, with a scale for the columns of each program."""
    shape = shape_of(matrices)
    width = shape[1] // (2 if gate is not None and gate.is_gated else 1)
    rows = Rows(given.codes, given.largest) if isinstance(given, Fp8Rows) else Rows(given)
    scheme = None
    if isinstance(matrices, PackedMatrix):
        scheme, parts = matrices.scheme, arrays_of(matrices)
        if scheme.has_offsets:
            piece = piece_width(tiling.depth, scheme, matrices.codes.shape[2])
            sums = rows.values.reshape(len(rows.values), -1, piece).sum(-1, dtype=jnp.float32)
            rows = rows._replace(sums=sums)
    else:
        parts = [matrices]
    arrays = rows, parts, pairs, experts, biases, weights
    num_results = len(experts) * sizes[0] if in_tiles else num_tokens * per_token + 1
    out = [jax.ShapeDtypeStruct((num_results, width), FP8 if ends_in_fp8 else dtype)]
    if ends_in_fp8:
        out.append(jax.ShapeDtypeStruct((width // tiling.columns, num_results), jnp.float32))
    results: list[jax.Array] = pl.pallas_call(
        functools.partial(
            _kernel,
            shape=shape,
            scheme=scheme,
            num_tokens=num_tokens,
            per_token=per_token,
            sizes=sizes,
            tiling=tiling,
            gate=gate,
            in_tiles=in_tiles,
            interpret=interpret,
        ),
        grid=(width // tiling.columns, len(experts)),
        in_specs=jax.tree.map(_whole, arrays),
        out_specs=[_whole(each) for each in out],
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="experts_up" if weights is None else "experts_down",
    )(*arrays)
    return tuple(results)


def _whole(array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda *program: (0,) * len(array.shape))


def _kernel(
    row_refs: Rows[jax.Ref],
    matrix_refs: tuple[jax.Ref, ...],
    pair_ref: jax.Ref,
    expert_ref: jax.Ref,
    bias_ref: jax.Ref | None,
    weight_ref: jax.Ref | None,
    out_ref: jax.Ref,
    *largest_refs: jax.Ref,
    shape: tuple[int, int, int],
    scheme: Scheme | None,
    num_tokens: int,
    per_token: int,
    sizes: tuple[int, ...],
    tiling: Tiling,
    gate: Gate | None,
    in_tiles: bool,
    interpret: bool,
) -> None:
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
        at = known // per_token if weight_ref is None else known
        if scheme is None:
            (matrix_ref,) = matrix_refs
            results = _sum_products(row_refs.values, matrix_ref, at, expert, starts, tiling, interpret)
        else:
            results = _sum_packed(row_refs, matrix_refs, scheme, at, expert, starts, tiling, interpret)
        columns, is_pair = first_column + jnp.arange(tiling.columns, dtype=jnp.int32), pairs < num_pairs
        if bias_ref is not None:
            results = tuple(
                result + along(bias_ref[expert, pl.ds(start, tiling.columns)])
                for result, start in zip(results, starts, strict=True)
            )
        result = results[0] if gate is None else gate.apply(results)
        if weight_ref is not None:
            result = result * across(plgpu.load(weight_ref.at[known]))
        of_columns = along(columns)
        mask = jnp.broadcast_to(across(is_pair), result.shape)
        to = tile * sizes[0] + jnp.arange(len(pairs), dtype=jnp.int32) if in_tiles else pairs
        for largest_ref in largest_refs:
            result, largest = round_group(result, 0 if tiling.is_matrix_first else 1)
            plgpu.store(largest_ref.at[first_column // tiling.columns, to], largest, mask=is_pair)
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


Loaded = tuple[tuple[Blocks, ...], list[jax.Array]]
"""Of a piece: the blocks of each matrix, and the largest values of FP8 rows."""


def _sum_packed(
    row_refs: Rows[jax.Ref],
    matrix_refs: tuple[jax.Ref, ...],
    scheme: Scheme,
    at: jax.Array,
    expert: jax.Array,
    starts: tuple[jax.Array, ...],
    tiling: Tiling,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The same with a packed matrix, which is always the left factor."""
    assert tiling.is_matrix_first
    width = matrix_refs[0].shape[2]
    piece = piece_width(tiling.depth, scheme, width)
    matrices = [
        PackedColumns(
            matrix_refs,
            scheme,
            start,
            tiling.columns,
            piece,
            tiling.num_warps,
            at=(expert,),
            multiplies_fp8=tiling.multiplies_fp8,
            interpret=interpret,
        )
        for start in starts
    ]

    def load_largest(group: jax.Array | int) -> list[jax.Array]:
        """Of rows in FP8."""
        refs = [] if row_refs.largest is None else [row_refs.largest]
        return [plgpu.load(ref.at[group, at]) for ref in refs]

    def load(first: jax.Array) -> Loaded:
        blocks = tuple(matrix.load_blocks(first) for matrix in matrices)
        return blocks, [] if scheme.columns is None else load_largest(first // scheme.columns)

    def load_rows(inputs: jax.Array) -> jax.Array:
        return plgpu.load(row_refs.values.at[at[:, None], inputs[None, :]])

    def add_piece(first: jax.Array, loaded: Loaded, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        blocks, largest = loaded
        rows = [load_rows(inputs) for inputs in matrices[0].inputs_of(first)]
        refs = [] if row_refs.sums is None else [row_refs.sums]
        starts = matrices[0].starts_of(first)
        sums = [plgpu.load(ref.at[at, start // piece]) for ref in refs for start in starts]
        given = zip(matrices, blocks, totals, strict=True)
        return tuple(
            matrix.add_piece(first, of_piece, rows, total, sums=sums, largest=largest)
            for matrix, of_piece, total in given
        )

    zeros = tuple(jnp.zeros((tiling.columns, len(at)), jnp.float32) for _ in starts)
    totals = sum_pieces(load, add_piece, zeros, width=width, piece=piece, depth=tiling.depth)
    last = load_largest(0) if scheme.columns is None else ()
    return tuple(matrix.finish(total, *last) for matrix, total in zip(matrices, totals, strict=True))
