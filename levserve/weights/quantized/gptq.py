"""GPTQ: four bits, a scale and a zero point for each group of inputs.

`qweight` is [in / 8, out], with eight inputs in an int32; `qzeros` is [group, out / 8]. The first version of
the format (`checkpoint_format: gptq`) stores each zero point minus one, the second (`gptq_v2`) stores it
unchanged. GPTQModel subtracts from whole int32 words, AutoGPTQ from each zero point.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from levserve.model.packed import Code, Scheme
from levserve.weights.config_fields import Fields
from levserve.weights.quantized.awq import read_group_size, require_four_bits
from levserve.weights.quantized.module import SCALE_TYPES, Module, across_rows, cut_across
from levserve.weights.quantized.packed_tensor import PackedTensor, Rows, unpack_nibbles
from levserve.weights.stored_tensor import Slice, StoredTensor

ONES = 0x11111111


class Zeros(Enum):
    """How zero points are stored."""

    UNCHANGED = auto()
    MINUS_ONE = auto()
    MINUS_ONE_IN_WORDS = auto()
    """One was subtracted from all eight in an int32 at once, so a zero point of 0 borrows from the next."""


@dataclass(frozen=True, slots=True)
class Gptq:
    group_size: int | None
    """Inputs that share a scale; None: all."""
    zeros: Zeros

    words = ("qweight", "qzeros", "scales", "g_idx")

    def is_quantized(self, words: Collection[str]) -> bool:
        return "qweight" in words

    def open(self, module: Module) -> PackedTensor:
        weight = module.take("qweight", "I32")
        zeros = module.take("qzeros", "I32")
        scales = module.take("scales", *SCALE_TYPES)
        num_words, num_rows = weight.get_shape()
        num_inputs = 8 * num_words
        group = self.group_size or num_inputs
        num_groups = -(-num_inputs // group)
        module.check_shape("qzeros", num_groups, -(-num_rows // 8))
        module.check_shape("scales", num_groups, num_rows)
        columns = None if num_groups == 1 else group
        matrix = PackedTensor(
            Scheme(Code.UINT4, columns, has_zeros=True, scale=SCALE_TYPES[scales.get_dtype()]),
            Rows((num_rows, num_inputs), lambda start, stop: _cut_codes(weight, start, stop)),
            across_rows(scales),
            Rows((num_rows, num_groups), lambda start, stop: self._cut_zeros(zeros, start, stop)),
        )
        if module.is_in_order("g_idx", num_inputs, group):
            return matrix
        return _with_groups(matrix, module.read_groups("g_idx", num_inputs, num_groups))

    def _cut_zeros(self, stored: Slice, start: int, stop: int) -> NDArray[np.uint8]:
        if self.zeros is Zeros.MINUS_ONE_IN_WORDS:
            return cut_across(stored, start, stop, added=ONES)
        zeros = cut_across(stored, start, stop)
        if self.zeros is Zeros.UNCHANGED:
            return zeros
        # A zero point of 0 was stored as -1, which is 15 in four bits.
        return (zeros + np.uint8(1)) & np.uint8(15)


def _with_groups(matrix: PackedTensor, groups: NDArray[np.int64]) -> PackedTensor:
    """The matrix with a scale for each weight, as groups of inputs are in any order (act-order, desc_act)."""

    def spread(part: StoredTensor) -> Rows:
        return Rows(matrix.shape, lambda start, stop: part.read(start, stop)[:, groups])

    assert matrix.zeros is not None
    scheme = replace(matrix.scheme, columns=1)
    return PackedTensor(scheme, matrix.codes, spread(matrix.scales), spread(matrix.zeros))


def _cut_codes(weight: Slice, start: int, stop: int) -> NDArray[np.uint8]:
    codes = unpack_nibbles(weight[:, start:stop])  # [in / 8, out, 8]
    return np.ascontiguousarray(codes.transpose(1, 0, 2)).reshape(stop - start, -1)


def read_gptq(fields: Fields) -> Gptq:
    require_four_bits(fields)
    fields.require({"checkpoint_format": ("gptq", "gptq_v2", None), "is_marlin_format": (False, None)})
    return Gptq(read_group_size(fields), _read_zeros(fields))


def _read_zeros(fields: Fields) -> Zeros:
    if fields.get("checkpoint_format") == "gptq_v2":
        return Zeros.UNCHANGED
    writers = fields.mapping("meta").get("quantizer")
    for writer in writers if isinstance(writers, list) else [writers]:
        if str(writer).lower().startswith("gptqmodel:"):
            return Zeros.MINUS_ONE_IN_WORDS
    return Zeros.MINUS_ONE
