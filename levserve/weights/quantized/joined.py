"""Gives one scheme to tensors that are stored in different schemes and fused into one array.

K-quant files have queries and keys in four bits, and the values of some layers in six. All can be expressed
with eight-bit codes, and with scales and offsets for groups as small as the smallest among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from levserve.model.packed import Code, Scheme
from levserve.weights.quantized.packed_tensor import Array, PackedTensor, Rows

FEWEST_COLUMNS = 16
"""The smallest number of inputs that share a scale: with fewer there is little left to gain."""


def join(schemes: Collection[Scheme]) -> Scheme | None:
    """A scheme that can express matrices of all these schemes, or None."""
    if len({replace(scheme, code=Code.INT8, columns=0, zero=0, has_offsets=False) for scheme in schemes}) > 1:
        return None
    if not all(map(_is_plain, schemes)):
        return None
    columns = math.gcd(*(scheme.columns or 0 for scheme in schemes))
    if columns < FEWEST_COLUMNS:
        return None
    has_offsets = any(scheme.has_offsets for scheme in schemes)
    first = next(iter(schemes))
    return replace(first, code=Code.INT8, columns=columns, zero=0, has_offsets=has_offsets)


def _is_plain(scheme: Scheme) -> bool:
    is_integer = scheme.code is Code.UINT4 or (scheme.code is Code.INT8 and scheme.zero == 0)
    return is_integer and scheme.columns is not None and scheme.rows == 1 and not scheme.has_zeros


def as_joined(tensor: PackedTensor, scheme: Scheme) -> PackedTensor:
    """The tensor in this scheme, which is its own or one that `join` made of it and others."""
    own = tensor.scheme
    if (own.code, own.columns, own.has_offsets) == (scheme.code, scheme.columns, scheme.has_offsets):
        return tensor
    assert own.columns is not None and scheme.columns is not None
    times, groups = own.columns // scheme.columns, scheme.num_groups(tensor.shape[-1])

    def of_groups(read: Callable[[int, int], Array]) -> Rows:
        return Rows(
            (*tensor.shape[:-1], groups), lambda *rows: np.repeat(read(*rows), times, -1)[..., :groups]
        )

    def no_offsets(start: int, stop: int) -> Array:
        return np.zeros_like(tensor.scales.read(start, stop))

    read_offsets = no_offsets if tensor.offsets is None else tensor.offsets.read
    offsets = of_groups(read_offsets) if scheme.has_offsets else None
    codes = Rows(tensor.shape, lambda *rows: tensor.codes.read(*rows).view(np.int8) - np.int8(own.zero))
    return PackedTensor(scheme, codes, of_groups(tensor.scales.read), offsets=offsets)
