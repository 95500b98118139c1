"""AWQ, as AutoAWQ writes it: four bits, a scale and a zero point for each group of inputs.

`qweight` is [in, out / 8] and `qzeros` [group, out / 8]. An int32 has eight outputs, in the order `ORDER`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from levserve.model.packed import Code, Scheme
from levserve.weights.config_fields import Fields
from levserve.weights.quantized.module import SCALE_TYPES, Module, across_rows, cut_across
from levserve.weights.quantized.packed_tensor import PackedTensor, Rows

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs each four bits of an int32 hold, lowest bits first."""
PLACES = np.argsort(ORDER)


@dataclass(frozen=True, slots=True)
class Awq:
    group_size: int | None
    """Inputs that share a scale; None: all."""

    words = ("qweight", "qzeros", "scales")

    def is_quantized(self, words: Collection[str]) -> bool:
        return "qweight" in words

    def open(self, module: Module) -> PackedTensor:
        weight = module.take("qweight", "I32")
        zeros = module.take("qzeros", "I32")
        scales = module.take("scales", *SCALE_TYPES)
        num_inputs, num_words = weight.get_shape()
        num_rows = 8 * num_words
        num_groups = num_inputs // (self.group_size or num_inputs)
        module.check_shape("qzeros", num_groups, num_words)
        module.check_shape("scales", num_groups, num_rows)
        columns = None if num_groups == 1 else self.group_size
        return PackedTensor(
            Scheme(Code.UINT4, columns, has_zeros=True, scale=SCALE_TYPES[scales.get_dtype()]),
            Rows((num_rows, num_inputs), lambda start, stop: cut_across(weight, start, stop, PLACES)),
            across_rows(scales),
            Rows((num_rows, num_groups), lambda start, stop: cut_across(zeros, start, stop, PLACES)),
        )


def read_awq(fields: Fields) -> Awq:
    require_four_bits(fields)
    fields.require({"version": ("gemm", "GEMM"), "zero_point": (True,)})
    return Awq(read_group_size(fields))


def require_four_bits(fields: Fields) -> None:
    if fields.integer("bits") != 4:
        raise fields.refused("bits")


def read_group_size(fields: Fields) -> int | None:
    """Inputs that share a scale; None: all."""
    return None if fields.get("group_size") == -1 else fields.integer("group_size")
