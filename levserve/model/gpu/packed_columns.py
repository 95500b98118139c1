"""Some rows of a packed matrix, widened in registers and multiplied inside Pallas kernels for NVIDIA GPUs.

Codes of up to eight bits are exact in bfloat16. The sum over a group of inputs is multiplied by its scale in
float32, so nothing but the other factor is rounded. The matrix is the left factor of every product, because
tensor cores take that one from registers; its rows are the columns of the result. If both factors are FP8,
nothing is widened: tensor cores multiply them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.cache import LARGEST_FP8
from levserve.model.gpu.fp8_dot import dot_fp8
from levserve.model.gpu.unpack import UINT4_OFFSET, unpack, unpack_plainly
from levserve.model.packed import Code, PackedMatrix, Scheme, decode_scale

WARP_GROUP = 4
"""Warps that use Hopper's larger instructions together, for at least `GROUP_COLUMNS` columns."""
GROUP_COLUMNS = 64


class Blocks(NamedTuple):
    """What the blocks of a piece have; of nibbles, those of the first values and of the second."""

    scales: tuple[jax.Array, ...]
    """Empty if all inputs share a scale."""
    zeros: tuple[jax.Array, ...]
    offsets: tuple[jax.Array, ...]


def arrays_of(matrix: PackedMatrix) -> list[jax.Array]:
    """The arrays of a matrix in the order in which `PackedColumns` takes references to them."""
    parts = (matrix.codes, matrix.scale, matrix.zero, matrix.offset)
    return [array for array in parts if array is not None]


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """`count` columns of the result, from `first` on, of a matrix in these references."""

    refs: tuple[jax.Ref, ...]
    scheme: Scheme
    first: jax.Array
    count: int
    piece: int
    """Bytes of each row that are read and multiplied together; see `piece_width`."""
    num_warps: int
    at: tuple[jax.Array, ...] = ()
    """Which matrix it is, if the references are to several."""
    multiplies_fp8: bool = False
    """Whether the codes and the other factor are FP8 and are multiplied so."""
    interpret: bool = False

    @property
    def width(self) -> int:
        """Bytes of each row."""
        return int(self.refs[0].shape[-1])

    @property
    def _pack(self) -> int:
        """Bytes that are widened together: as many as lie side by side in a thread's registers."""
        return 2 if self.num_warps >= WARP_GROUP and self.count >= GROUP_COLUMNS else 4

    def inputs_of(self, first: jax.Array) -> list[jax.Array]:
        """The inputs of the piece that begins at this byte: of nibbles, those of the first values and of the
        second."""
        return [start + jnp.arange(self.piece, dtype=jnp.int32) for start in self.starts_of(first)]

    def starts_of(self, first: jax.Array) -> list[jax.Array]:
        """The first of each of these."""
        return [first, first + self.width] if self.scheme.code.is_nibble else [first]

    def load_blocks(self, first: jax.Array) -> Blocks:
        scheme = self.scheme
        inputs = self.starts_of(first)
        _, scale_ref, *others = self.refs
        zero_refs, offset_refs = others[: scheme.has_zeros], others[scheme.has_zeros :]
        return Blocks(
            () if scheme.columns is None else tuple(self._of_blocks(scale_ref, each) for each in inputs),
            tuple(self._of_blocks(ref, each) for ref in zero_refs for each in inputs),
            tuple(self._of_blocks(ref, each) for ref in offset_refs for each in inputs),
        )

    def add_piece(
        self,
        first: jax.Array,
        blocks: Blocks,
        others: Sequence[jax.Array],
        total: jax.Array,
        *,
        sums: Sequence[jax.Array] = (),
        largest: Sequence[jax.Array] = (),
    ) -> jax.Array:
        """`total` [column, row] plus the product of the piece that begins at this byte; `others` are the rows
        [row, input] of the other factor for `inputs_of` the piece. For offsets, `sums` [row] are their sums;
        FP8 rows have the `largest` [row] of the inputs that share a scale, unless all inputs do.
        """
        columns = pl.ds(self.first, self.count)
        codes = self.refs[0][(*self.at, columns, pl.ds(first, self.piece))]
        for number, (rows, tile) in enumerate(zip(others, self._tiles_of(codes, blocks.zeros), strict=True)):
            product = self._multiply(tile, rows.T)
            if blocks.scales:
                scale = self._scale_of(blocks.scales[number], *largest)
                total = self._add_product(product, scale, total)
            else:
                total = total + product
            if blocks.offsets:
                offset = _across(decode_scale(blocks.offsets[number]))
                total = self._add_product(sums[number][None, :], offset, total)
        return total

    def finish(self, total: jax.Array, *largest: jax.Array) -> jax.Array:
        """The sum of all pieces with the scales that all inputs share, if they do."""
        if self.scheme.columns is not None:
            return total
        return total * self._scale_of(self._of_blocks(self.refs[1], jnp.int32(0)), *largest)

    def _scale_of(self, scale: jax.Array, *largest: jax.Array) -> jax.Array:
        """The factor of a product [column, row]."""
        factor = _across(decode_scale(scale))
        for each in largest:
            factor = factor * (1 / LARGEST_FP8) * each[None, :]
        return factor

    def _add_product(self, left: jax.Array, right: jax.Array, total: jax.Array) -> jax.Array:
        """`left * right + total` in one instruction; Triton makes two of it."""
        if self.interpret:
            return total + left * right
        factors = [jnp.broadcast_to(factor, total.shape) for factor in (left, right)]
        (result,) = plgpu.elementwise_inline_asm(
            "fma.rn.f32 $0, $1, $2, $3;",
            args=[*factors, total],
            constraints="=f,f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, total.dtype)],
        )
        return result

    def _tiles_of(self, codes: jax.Array, zeros: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
        if self.multiplies_fp8:
            return (codes,)
        if self.interpret:
            return unpack_plainly(codes, self.scheme.code, self._zeros_of(zeros))
        return unpack(codes, self.scheme.code, self._zeros_of(zeros), self._pack)

    def _multiply(self, tile: jax.Array, others: jax.Array) -> jax.Array:
        return (
            dot_fp8(tile, others) if self.multiplies_fp8 and not self.interpret else plgpu.dot(tile, others)
        )

    def _of_blocks(self, ref: jax.Ref, first: jax.Array) -> jax.Array:
        """One value per column, for the group of this input; a single value if all columns share a block."""
        scheme = self.scheme
        group = 0 if scheme.columns is None else first // scheme.columns
        if scheme.rows % self.count == 0:
            return plgpu.load(ref.at[(*self.at, group, self.first // scheme.rows)])
        columns = self.first + jnp.arange(self.count, dtype=jnp.int32)
        return plgpu.load(ref.at[(*self.at, group, columns // scheme.rows if scheme.rows > 1 else columns)])

    def _zeros_of(self, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        if self.scheme.code is not Code.UINT4:
            return ()
        if not found:
            return (jnp.full(self.count, UINT4_OFFSET + self.scheme.zero, jnp.bfloat16),) * 2
        return tuple(zero.astype(jnp.bfloat16) + jnp.bfloat16(UINT4_OFFSET) for zero in found)


def _across(numbers: jax.Array) -> jax.Array:
    """One value per column, broadcast over the rows of the other factor."""
    return numbers[:, None] if numbers.ndim else numbers
