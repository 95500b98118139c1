"""Quantizes matrices to int8 when they are loaded: with one scale per output row, or with one for every 32
inputs (`int8_blocks`). Those that stay in four bits (`int4_blocks`) are only reordered, and those that become
FP8 are only chosen here, because they have the form of an FP8 checkpoint's (`packed`).

A GPU widens matrices as it reads them, and the reading is what takes time. A CPU multiplies int8 faster than
anything else, so there each row of activations is rounded to int8 too, with a scale of its own, after a
Hadamard rotation that leaves no value far larger than the others (`hadamard`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from levserve.model.aligned import aligned_array
from levserve.model.backend import Backend
from levserve.model.balance import BALANCE, Balanced, can_balance
from levserve.model.config import ModelConfig
from levserve.model.hadamard import rotate
from levserve.model.int4_blocks import FourBits, can_widen, has_middles
from levserve.model.int8_blocks import BLOCK, MIN_PRODUCT_ROWS, TooLarge, has_blocks
from levserve.model.int8_packing import (
    OUTS,
    SMALLEST,
    STEPS,
    WIDENED_BYTES,
    WIDENED_NIBBLES,
    BlockOrder,
    is_packable,
    pack,
)
from levserve.model.matrix_rows import Array, MatrixRows, as_rows
from levserve.model.packed import Code, Kept, Scheme
from levserve.model.parameter_shapes import parameter_shapes

ROWS_PER_TASK = 256
NUMBERS_PER_PIECE = 1 << 20
"""Values that a thread reads and rounds at a time: with smaller pieces threads wait for the GIL."""
BLOCKS_NAME, FOUR_BITS_NAME, WIDENED_NAME, FP8_NAME = "int8-blocks", "int4-blocks", "int4", "fp8"
IN_FOUR_BITS = (FOUR_BITS_NAME, WIDENED_NAME)
IN_BLOCKS = (BLOCKS_NAME, *IN_FOUR_BITS)
NARROW: dict[str, jnp.dtype] = dict.fromkeys(("int8", *IN_BLOCKS), jnp.dtype(jnp.int8))
"""The integers that `--quantize` can name; in four bits, what matrices become that have more."""
QUANTIZED = ("qkv", "out", "gate_up", "down", "head")
LOOKED_UP = ("embed", "positions")
FP8_ROWS = Scheme(Code.FP8, rounds_rows=True)
"""What `--quantize fp8` makes of a matrix."""
NOT_IN_FP8 = (*LOOKED_UP, "head", "router", "shared_gate")
"""What it leaves alone: no later layer averages what the head rounds, and routers and gates are small."""


@dataclass(frozen=True)
class Quantization:
    """How matrices are stored in eight bits or four, and multiplied."""

    kept: jnp.dtype
    widened: jnp.dtype | None
    """The type that they are widened to for a product; None: they are rotated and multiplied as integers."""
    is_packed: bool = False
    """Whether matrices of a suitable shape are in the order of `int8_packing`."""
    has_blocks: bool = False
    """Whether rows of whole blocks have a scale for each block; only if matrices are not widened."""
    block_order: BlockOrder | None = None
    """The order of matrices with scales for blocks; None: that of the inputs."""
    four_bits: tuple[tuple[str, Scheme], ...] = ()
    """The matrices that stay in the four bits of their file, each with its scheme there."""
    widens_blocks: bool = False
    """Whether matrices with scales for blocks are widened to bfloat16 as they are multiplied, but for the
    head and those whose rows do not fit."""
    refines_logits: bool = False
    """Whether the backend computes the largest logits again (`Backend.refine`)."""

    @property
    def is_balanced(self) -> bool:
        """Whether matrices gain from `balance`: if rows on both sides of a product have one scale each."""
        return self.widened is None and not self.has_blocks and not self.four_bits

    def rounds_in_blocks(self, config: ModelConfig, name: str, columns: int, num_shares: int = 1) -> bool:
        """Whether a matrix has a scale for each block.

        A head whose largest logits are computed again has one for each row: with blocks it would need two
        terms of activations, which take twice the time, for a text that is hardly more exact.
        """
        keeps_codes = bool(self.four_bits) and not self.widens_blocks
        is_refined = self.refines_logits and not keeps_codes and num_shares == 1
        if name == "head" and is_refined and config.tied_head and not config.head_bias:
            return False
        return self.has_blocks and has_blocks(columns)

    def four_bit_order(self, shape: tuple[int, ...]) -> BlockOrder | None:
        """The order of a matrix [out, in] that stays in four bits."""
        num_rows, columns = shape
        order = WIDENED_NIBBLES if self.widens_blocks and can_widen(columns) else self.block_order
        return order if order is not None and order.takes(num_rows) else None

    def widens(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a matrix [out, in] in eight bits with scales for blocks is one that products widen."""
        num_rows, columns = shape
        fits = WIDENED_BYTES.takes(num_rows) and can_widen(columns)
        return self.widens_blocks and name != "head" and fits

    def __str__(self) -> str:
        others = f"{len(self.four_bits)} in the four bits of their file, others in " if self.four_bits else ""
        if self.widens_blocks:
            return f"{others}{self.kept}, multiplied in bfloat16"
        scales = f" with a scale for {BLOCK} inputs" if self.has_blocks else ""
        return f"{others}{self.kept}{scales}, multiplied in {self.widened or self.kept}"


def widens_blocks(quantize: str, backend: Backend) -> bool:
    """Whether products widen the matrices of this format; int4 is offered only where they can."""
    return quantize == WIDENED_NAME or (quantize == BLOCKS_NAME and backend.can_widen_blocks)


def choose_quantization(
    kept: jnp.dtype | None,
    backend: Backend,
    dtype: jnp.dtype,
    *,
    in_blocks: bool = False,
    four_bits: Mapping[str, Scheme] | None = None,
    widens_blocks: bool = False,
) -> Quantization | None:
    """How the backend quantizes matrices to the type `kept`, if the others are in `dtype`; None: not at all.

    Matrices named in `four_bits` stay as they are; only some backends can widen blocks.
    """
    if kept is None:
        return None
    widened = backend.multiplied_in(dtype)
    return Quantization(
        kept,
        widened,
        is_packed=backend.packs(kept),
        has_blocks=in_blocks and widened is None,
        block_order=backend.block_order,
        four_bits=tuple((four_bits or {}).items()),
        widens_blocks=widens_blocks,
        refines_logits=backend.refines_logits,
    )


def keep_in_fp8(config: ModelConfig, widened: jnp.dtype) -> Kept:
    """The matrices of attention and feed-forward parts, rounded to FP8 from whatever the checkpoint has."""
    names = [
        name
        for name, shape in parameter_shapes(config).items()
        if len(shape) > 1 and not name.endswith("_bias") and name.rsplit(".", 1)[-1] not in NOT_IN_FP8
    ]
    return Kept(tuple((name, FP8_ROWS) for name in names), widened, is_rounded=True)


def multiply_rotated(weight: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
    """x [row, in] times a rotated int8 matrix [out, in] with a scale for each output: float32 [row, out]."""
    rotated = rotate(x)
    x_scale = jnp.maximum(jnp.abs(rotated).max(1, keepdims=True), SMALLEST) / STEPS
    integers = jnp.round(rotated / x_scale).astype(jnp.int8)
    padded = jnp.pad(integers, ((0, max(0, MIN_PRODUCT_ROWS - len(x))), (0, 0)))
    product = jnp.einsum("rk,ok->ro", padded, weight, preferred_element_type=jnp.int32)[: len(x)]
    return product.astype(jnp.float32) * x_scale * scale[None]


def quantize_arrays(
    config: ModelConfig,
    arrays: Iterable[tuple[str, NDArray[np.generic] | MatrixRows | Balanced | FourBits]],
    dtype: jnp.dtype,
    quantization: Quantization,
    num_threads: int = 2,
    *,
    num_shares: int = 1,
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Quantizes a stream of float32 arrays: matrices to eight bits with scales, embeddings to `dtype`; norms
    stay.

    A head that shares the embedding's matrix gets a quantized matrix of its own. A matrix that is cut comes
    as `num_shares` shares stacked along its first axis. Raises `TooLarge`.
    """
    has_own_head = not config.tied_head or "head" in dict(quantization.four_bits)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="levserve-quantize") as pool:
        for name, array in arrays:
            if isinstance(array, FourBits):
                weight, scale = _pack_four_bits(array, quantization.four_bit_order(array.codes.shape), pool)
                yield name, weight
                yield f"{name}_scale", scale
                continue
            is_head = name == "embed" and not has_own_head
            if is_quantized(name) or is_head:
                target = "head" if is_head else name
                matrix = array if isinstance(array, Balanced) else _as_it_is(as_rows(array))
                if quantization.rounds_in_blocks(config, target, matrix.rows.shape[1], num_shares):
                    try:
                        weight, scale = _quantize_blocks(target, matrix.rows, quantization, pool, num_shares)
                    except TooLarge as error:
                        raise TooLarge(f"{target}: {error}") from None
                else:
                    weight, scale = _quantize_rows(matrix, quantization, pool, num_shares)
                yield target, weight
                yield f"{target}_scale", scale
            if name in LOOKED_UP:
                assert not isinstance(array, Balanced)
                yield name, _narrow(as_rows(array), dtype, pool)
            elif not is_quantized(name):
                assert isinstance(array, np.ndarray)
                yield name, array


def quantized_bytes(config: ModelConfig, dtype: jnp.dtype, quantization: Quantization) -> int:
    """Bytes of all arrays of a model of this shape once it is quantized."""
    shapes = parameter_shapes(config)
    if config.tied_head:
        shapes["head"] = shapes["embed"]
    if quantization.is_balanced and can_balance(config):
        shapes[BALANCE] = (config.hidden_size,)
    total, four_bits = 0, dict(quantization.four_bits)
    for name, shape in shapes.items():
        size = math.prod(shape)
        if name in four_bits:
            total += size // 2 + size // BLOCK * (4 if has_middles(four_bits[name]) else 2)
        elif name in LOOKED_UP:
            total += size * dtype.itemsize
        elif not is_quantized(name):
            total += size * 4
        elif quantization.rounds_in_blocks(config, name, shape[1]):
            total += size + size // BLOCK * (4 if quantization.widens(name, shape) else 2)
        else:
            total += size + shape[0] * 4
    return total


def is_quantized(name: str) -> bool:
    """Whether `--quantize` applies to this array of `parameter_shapes`."""
    return name.rsplit(".", 1)[-1] in QUANTIZED


def _as_it_is(rows: MatrixRows) -> Balanced:
    return Balanced(rows, np.ones(rows.shape[1], np.float32))


def _quantize_rows(
    matrix: Balanced, quantization: Quantization, pool: ThreadPoolExecutor, num_shares: int
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """The quantized matrix [out, in] and its scales, float32 [out]."""
    num_rows, columns = matrix.rows.shape
    is_packed = quantization.is_packed and is_packable(num_rows // num_shares, columns)
    quantized = aligned_array((num_rows, columns), np.dtype(np.uint8 if is_packed else quantization.kept))
    scale = np.empty(num_rows, np.float32)
    tokens = np.empty((0, columns), np.float32) if matrix.tokens is None else matrix.tokens
    products = np.empty((len(tokens), num_rows), np.float32)
    is_rotated = quantization.widened is None
    if is_rotated:
        from levserve.model.cpu import host_rows  # brings LLVM, which a GPU does not need

        host_rows.load_functions(columns)

    def quantize_piece(part: slice) -> None:
        rows, into = matrix.rows.read(part.start, part.stop), quantized[part]
        if len(tokens):
            products[:, part] = host_rows.multiply_rows(tokens, rows)
        if is_rotated:
            scale[part] = host_rows.round_rows(rows, matrix.columns, into.view(np.int8))
        else:
            scale[part] = _round_rows(rows, into)
        if is_packed:
            into[:] = pack(into)

    for _ in pool.map(quantize_piece, _pieces(num_rows, columns)):
        pass
    divisors = matrix.take(products) if len(tokens) else None
    return quantized, scale if divisors is None else scale / divisors


def _round_rows(rows: Array, into: NDArray[np.generic]) -> Array:
    """Rounds rows to int8, without a rotation; gives their scales."""
    largest = np.maximum(np.maximum(rows.max(1), -rows.min(1)), np.float32(SMALLEST))
    scaled = rows * (np.float32(STEPS) / largest)[:, None]
    into[:] = np.rint(scaled, out=scaled)
    return largest / np.float32(STEPS)


def _pieces(num_rows: int, columns: int) -> list[slice]:
    """Rows that a thread reads and rounds at a time: whole tiles of any packing order."""
    step = max(1, NUMBERS_PER_PIECE // (OUTS * columns)) * OUTS
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _narrow(matrix: MatrixRows, dtype: jnp.dtype, pool: ThreadPoolExecutor) -> NDArray[np.generic]:
    """Casts a matrix that is not quantized."""
    kept = aligned_array(matrix.shape, np.dtype(dtype))

    def fill(part: slice) -> None:
        kept[part] = matrix.read(part.start, part.stop)

    for _ in pool.map(fill, _pieces(*matrix.shape)):
        pass
    return kept


def _quantize_blocks(
    name: str, matrix: MatrixRows, quantization: Quantization, pool: ThreadPoolExecutor, num_shares: int
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """The quantized matrix, and the scales of its blocks."""
    if quantization.widens(name, matrix.shape):
        return _quantize_widened(matrix, pool)
    return _quantize_in_integers(matrix, quantization.block_order, pool, num_shares, is_head=name == "head")


def _quantize_in_integers(
    matrix: MatrixRows,
    order: BlockOrder | None,
    pool: ThreadPoolExecutor,
    num_shares: int,
    *,
    is_head: bool,
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """The quantized matrix [out, in] and its scales, float16 [out, in / 32]."""
    from levserve.model.cpu import host_blocks  # brings LLVM, which a GPU does not need

    num_rows, columns = matrix.shape
    order = order if order is not None and order.takes(num_rows // num_shares) else None
    is_unsigned = order is not None and order.offset > 0
    quantized = aligned_array((num_rows, columns), np.dtype(np.uint8 if is_unsigned else np.int8))
    scales = aligned_array((num_rows, columns // BLOCK), np.dtype(np.float16))
    host_blocks.load_functions(is_rotated=not is_head)

    def quantize_piece(part: slice) -> None:
        rows = matrix.read(part.start, part.stop)
        integers, scale = host_blocks.round_blocks(rows, is_rotated=not is_head)
        if order is not None:
            scale = order.pack_scales(scale)
        quantized[part] = integers if order is None else order.pack(integers).view(quantized.dtype)
        scales[part] = scale

    for _ in pool.map(quantize_piece, _pieces(num_rows, columns)):
        pass
    return quantized, scales


def _quantize_widened(
    matrix: MatrixRows, pool: ThreadPoolExecutor
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """A matrix that products widen, in pairs of numbers [out, in / 2], and the scale and the middle of each
    block, float16 [out, in / 16]."""
    from levserve.model.cpu import host_middles  # brings LLVM, which a GPU does not need

    num_rows, columns = matrix.shape
    quantized = aligned_array((num_rows, columns), np.dtype(np.uint8))
    scales = aligned_array((num_rows, columns // BLOCK * 2), np.dtype(np.float16))
    host_middles.load_functions()

    def quantize_piece(part: slice) -> None:
        integers, scale, middle = host_middles.round_blocks(matrix.read(part.start, part.stop))
        quantized[part] = WIDENED_BYTES.pack(integers)
        scales[part] = WIDENED_BYTES.pack_scales(np.stack([scale, middle], -1).reshape(len(scale), -1))

    for _ in pool.map(quantize_piece, _pieces(num_rows, columns)):
        pass
    return quantized.view(np.int16), scales


def _pack_four_bits(
    matrix: FourBits, order: BlockOrder | None, pool: ThreadPoolExecutor
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """The bytes [out, in / 2], signed if the order is for signed bytes, and the scales; or in
    `WIDENED_NIBBLES` pairs of bytes."""
    rows, columns = matrix.codes.shape
    is_signed = order is not None and not order.offset
    packed = aligned_array((rows, columns // 2), np.dtype(np.int8 if is_signed else np.uint8))
    per_block = 1 if matrix.middles is None else 2
    scales = aligned_array((rows, columns // BLOCK * per_block), np.dtype(np.float16))

    def pack_from(start: int) -> None:
        part = slice(start, start + ROWS_PER_TASK)
        weight, scale = matrix.rows(part).pack(order)
        packed[part], scales[part] = weight.view(packed.dtype), scale

    for _ in pool.map(pack_from, range(0, rows, ROWS_PER_TASK)):
        pass
    return packed.view(np.uint16) if order == WIDENED_NIBBLES else packed, scales
