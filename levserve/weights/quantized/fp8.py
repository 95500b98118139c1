"""FP8 (e4m3) with a scale for each block of a matrix, as in DeepSeek's and Qwen's FP8 checkpoints, or one
scale for the whole matrix."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from levserve.model.packed import Code, Scheme
from levserve.weights.config_fields import Fields
from levserve.weights.quantized.module import SCALE_TYPES, Module, block_rows
from levserve.weights.quantized.packed_tensor import PackedTensor, Rows
from levserve.weights.stored_tensor import Slice

Block = tuple[int, int]
SCALE_WORDS = ("weight_scale_inv", "weight_scale")
"""The names of scales; weights are multiplied by either. transformers uses the first name also for matrices
with a single scale."""


@dataclass(frozen=True, slots=True)
class Fp8:
    block: Block | None
    """Outputs and inputs that share a scale; None: all of the matrix."""
    rounds_rows: bool = False
    """Whether activations are quantized with scales computed at run time (`activation_scheme: dynamic`)."""

    words = ("weight", *SCALE_WORDS, "input_scale", "activation_scale")

    def is_quantized(self, words: Collection[str]) -> bool:
        return any(word in words for word in SCALE_WORDS)

    def open(self, module: Module) -> PackedTensor:
        weight = module.take("weight", "F8_E4M3")
        word = next(word for word in SCALE_WORDS if word in module.tensors)
        matrix = scaled_matrix(module, weight, Code.FP8, word, self.block)
        return rounding_rows(matrix) if self.rounds_rows else matrix


def scaled_matrix(module: Module, weight: Slice, code: Code, word: str, block: Block | None) -> PackedTensor:
    """A matrix [out, in] of bytes, with a scale for each block, row or group within a row, or one for all."""
    scale = module.take(word, *SCALE_TYPES)
    num_rows, num_inputs = weight.get_shape()
    dtype, shape = SCALE_TYPES[scale.get_dtype()], tuple(scale.get_shape())
    codes = Rows((num_rows, num_inputs), lambda start, stop: weight[start:stop])
    if shape in ((), (1,), (1, 1)):
        return PackedTensor(Scheme(code, scale=dtype), codes, _one_scale(scale, num_rows))
    if block is None or shape == (num_rows, 1):
        num_groups = shape[1] if len(shape) == 2 and shape[1] > 0 else 1
        module.check_shape(word, num_rows, num_groups)
        columns = None if num_groups == 1 else num_inputs // num_groups
        rows = Rows((num_rows, num_groups), lambda start, stop: scale[start:stop])
        return PackedTensor(Scheme(code, columns, scale=dtype), codes, rows)
    outputs, inputs = block
    num_groups = -(-num_inputs // inputs)
    module.check_shape(word, -(-num_rows // outputs), num_groups)
    columns = None if num_groups == 1 else inputs
    blocks = block_rows(scale, (num_rows, num_groups), outputs)
    return PackedTensor(Scheme(code, columns, outputs, scale=dtype), codes, blocks)


def rounding_rows(matrix: PackedTensor) -> PackedTensor:
    """The same matrix, for activations in FP8; unchanged if its last group of inputs is smaller."""
    if matrix.shape[-1] % (matrix.scheme.columns or 1):
        return matrix
    return replace(matrix, scheme=replace(matrix.scheme, rounds_rows=True))


def _one_scale(scale: Slice, num_rows: int) -> Rows:
    number = np.asarray(scale[()] if not scale.get_shape() else scale[:]).reshape(1, 1)
    return Rows((num_rows, 1), lambda start, stop: np.broadcast_to(number, (stop - start, 1)))


def read_fp8(fields: Fields) -> Fp8:
    fields.require({"fmt": ("e4m3", None), "activation_scheme": ("dynamic", "static", None)})
    # If the key is absent, transformers quantizes activations as well. Static scales, one for a layer,
    # and powers of two (`scale_fmt: ue8m0`) are not supported: such activations are not quantized here.
    is_dynamic = fields.get("activation_scheme") in ("dynamic", None)
    is_exact = fields.get("scale_fmt") in ("float", None)
    return Fp8(read_block(fields, "weight_block_size"), is_dynamic and is_exact)


def read_block(fields: Fields, key: str) -> Block | None:
    if fields.get(key) is None:
        return None
    outputs, inputs = fields.numbers(key, 2)
    if min(outputs, inputs) < 1:
        raise fields.refused(key)
    return int(outputs), int(inputs)
