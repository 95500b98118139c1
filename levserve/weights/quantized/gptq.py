"""GPTQ: four bits, a scale and a zero point for each group of inputs.

`qweight` is [in / 8, out], with eight inputs in an int32; `qzeros` is [group, out / 8]. The first form of the
format (`checkpoint_format: gptq`) stores zero points minus one, the second (`gptq_v2`) as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from levserve.model.packed import Code, Scheme
from levserve.weights.config_fields import Fields
from levserve.weights.quantized.awq import read_group_size, require_four_bits
from levserve.weights.quantized.module import SCALE_TYPES, Module, across_rows, cut_across
from levserve.weights.quantized.packed_tensor import PackedTensor, Rows, unpack_nibbles
from levserve.weights.stored_tensor import Slice


@dataclass(frozen=True, slots=True)
class Gptq:
    group_size: int | None
    """None: all inputs."""
    zero_offset: int
    """What is added to a stored zero point."""

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
        module.check_order("g_idx", num_inputs, group)
        columns = None if num_groups == 1 else group
        return PackedTensor(
            Scheme(Code.UINT4, columns, has_zeros=True, scale=SCALE_TYPES[scales.get_dtype()]),
            Rows((num_rows, num_inputs), lambda start, stop: _cut_codes(weight, start, stop)),
            across_rows(scales),
            Rows((num_rows, num_groups), lambda start, stop: self._cut_zeros(zeros, start, stop)),
        )

    def _cut_zeros(self, zeros: Slice, start: int, stop: int) -> NDArray[np.uint8]:
        # A zero point of 0 was stored as -1, which is 15 in four bits.
        return (cut_across(zeros, start, stop) + np.uint8(self.zero_offset)) & np.uint8(15)


def _cut_codes(weight: Slice, start: int, stop: int) -> NDArray[np.uint8]:
    codes = unpack_nibbles(weight[:, start:stop])  # [in / 8, out, 8]
    return np.ascontiguousarray(codes.transpose(1, 0, 2)).reshape(stop - start, -1)


def read_gptq(fields: Fields) -> Gptq:
    require_four_bits(fields)
    fields.require({"checkpoint_format": ("gptq", "gptq_v2", None), "is_marlin_format": (False, None)})
    is_second = fields.get("checkpoint_format") == "gptq_v2"
    return Gptq(read_group_size(fields), 0 if is_second else 1)
