"""GGUF's blocks of integers, kept in the bits that they are stored in.

A block of 32 or 256 weights has 16-bit scales. In blocks of 256 (the K-quants), the scale and the offset of
each group of 32 or 16 weights are small integers times a 16-bit factor of the block; these products are
rounded to 16 bits here. Codes of five and six bits are kept in eight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import Q4_K
from numpy.typing import NDArray

from levserve.model.packed import Code, Scheme
from levserve.weights.quantized.packed_tensor import Array, PackedTensor, Rows
from levserve.weights.stored_tensor import ALL, StoredTensor

Bytes = NDArray[np.uint8]
"""[block, byte]"""
FLOAT16 = jnp.dtype(jnp.float16)


@dataclass(frozen=True, slots=True)
class Form:
    """How the blocks of one kind are read; each part is [block, weight] or [block, group]."""

    scheme: Scheme
    codes: Callable[[Bytes], Array]
    scales: Callable[[Bytes], Array]
    offsets: Callable[[Bytes], Array] | None = None
    axes: tuple[int, ...] = (2, 3)
    """How many axes the tensors that stay quantized have: a matrix has two, and those of experts three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(PackedTensor):
    """A matrix whose weights, unlike its parts, are read from `whole` without rounding a scale."""

    whole: StoredTensor

    def read(self, start: int, stop: int, columns: slice = ALL) -> Array:
        return self.whole.read(start, stop, columns)


def open_blocks(kind: Kind, whole: StoredTensor, read_rows: Callable[[int, int], Bytes]) -> StoredTensor:
    """The tensor in a form that can stay quantized, if its kind can; `read_rows` reads [row, byte]."""
    form = FORMS.get(kind)
    if form is None or len(whole.shape) not in form.axes:
        return whole
    *outer, num_inputs = whole.shape
    _, block_bytes = GGML_QUANT_SIZES[kind]

    def part(width: int, decode: Callable[[Bytes], Array]) -> Rows:
        def read(start: int, stop: int) -> Array:
            numbers = decode(read_rows(start, stop).reshape(-1, block_bytes))
            return numbers.reshape(stop - start, *outer[1:], width)

        return Rows((*outer, width), read)

    groups = form.scheme.num_groups(num_inputs)
    return Blocks(
        form.scheme,
        part(num_inputs, form.codes),
        part(groups, form.scales),
        offsets=None if form.offsets is None else part(groups, form.offsets),
        whole=whole,
    )


def _half(at: int) -> Callable[[Bytes], Array]:
    """Reads the float16 at this byte of each block."""
    return lambda blocks: np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(at: int, run: int, blocks: Bytes) -> Bytes:
    """The lower halves of each `run` bytes, then their upper halves."""
    packed = blocks[:, at:].reshape(len(blocks), -1, 1, run)
    return (packed >> np.asarray([[0], [4]], np.uint8) & np.uint8(15)).reshape(len(blocks), -1)


def _fifth_bits(at: int, blocks: Bytes) -> Bytes:
    """The fifth bits of 32 codes, which four bytes hold, as 0 or 16."""
    return np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Array:
    return (_nibbles(6, 16, blocks) | _fifth_bits(2, blocks)).view(np.int8) - np.int8(16)


def _q5_1(blocks: Bytes) -> Array:
    return (_nibbles(8, 16, blocks) | _fifth_bits(4, blocks)).view(np.int8)


def _q5_k(blocks: Bytes) -> Array:
    upper = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (_nibbles(48, 32, blocks) | upper.reshape(len(blocks), -1) << 4).view(np.int8)


def _q6_k(blocks: Bytes) -> Array:
    lower = _nibbles(0, 64, blocks[:, :128])
    upper = (
        blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> np.asarray([[0], [2], [4], [6]], np.uint8) & 3
    )
    return (lower | upper.reshape(len(blocks), -1) << 4).view(np.int8) - np.int8(32)


def _q6_k_scales(blocks: Bytes) -> Array:
    factors = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return (_half(208)(blocks).astype(np.float32) * factors).astype(np.float16)


def _k_scales(blocks: Bytes) -> Array:
    factors, _ = Q4_K.get_scale_min(blocks[:, 4:16])
    scales: Array = (_half(0)(blocks).astype(np.float32) * factors).astype(np.float16)
    return scales


def _k_offsets(blocks: Bytes) -> Array:
    _, factors = Q4_K.get_scale_min(blocks[:, 4:16])
    return (_half(2)(blocks).astype(np.float32) * -factors.astype(np.float32)).astype(np.float16)


def _scheme(code: Code, columns: int = 32, zero: int = 0, *, has_offsets: bool = False) -> Scheme:
    return Scheme(code, columns, zero=zero, has_offsets=has_offsets, scale=FLOAT16)


FORMS = {
    Kind.Q4_0: Form(_scheme(Code.UINT4, zero=8), lambda blocks: _nibbles(2, 16, blocks), _half(0)),
    Kind.Q4_1: Form(
        _scheme(Code.UINT4, has_offsets=True), lambda blocks: _nibbles(4, 16, blocks), _half(0), _half(2)
    ),
    Kind.Q5_0: Form(_scheme(Code.INT8), _q5_0, _half(0)),
    Kind.Q5_1: Form(_scheme(Code.INT8, has_offsets=True), _q5_1, _half(0), _half(2)),
    Kind.Q8_0: Form(_scheme(Code.INT8), lambda blocks: blocks[:, 2:].view(np.int8), _half(0)),
    Kind.Q4_K: Form(
        _scheme(Code.UINT4, has_offsets=True), lambda blocks: _nibbles(16, 32, blocks), _k_scales, _k_offsets
    ),
    Kind.Q5_K: Form(_scheme(Code.INT8, has_offsets=True), _q5_k, _k_scales, _k_offsets),
    Kind.Q6_K: Form(_scheme(Code.INT8, 16), _q6_k, _q6_k_scales),
    Kind.MXFP4: Form(
        Scheme(Code.E2M1, 32, scale=jnp.dtype(jnp.uint8)),
        lambda blocks: _nibbles(1, 16, blocks),
        lambda blocks: blocks[:, :1],
        axes=(3,),
    ),
}
