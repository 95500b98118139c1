"""compressed-tensors, as llm-compressor writes it: FP8, INT8, and four or eight bits packed in int32.

A layer's tensors show which of these it uses: `weight_packed` is [out, in / 8] (or / 4), with the inputs in
order and half of the codes' range added; `weight` is [out, in] in FP8 or INT8. Activations are quantized only
with an FP8 matrix, and only if the configuration asks for FP8 with dynamic scales, each for as many inputs as
a scale of the matrix.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.model.packed import Code, Scheme
from levserve.weights.config_fields import Fields
from levserve.weights.quantized.fp8 import Block, read_block, rounding_rows, scaled_matrix
from levserve.weights.quantized.module import SCALE_TYPES, Module
from levserve.weights.quantized.packed_tensor import PackedTensor, Rows, unpack_nibbles
from levserve.weights.stored_tensor import Slice

FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision", None)
KINDS = ((4, "int"), (8, "int"), (8, "float"))
OFFSET = 8
"""Added to signed four-bit codes and to their zero points, which makes them unsigned."""


@dataclass(frozen=True, slots=True)
class Compressed:
    block: Block | None
    """Outputs and inputs that share a scale; None if scales are not for blocks."""
    row_groups: tuple[int | None, ...] = ()
    """Inputs that share a scale in activations that are quantized to FP8; None stands for all inputs."""

    words = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
    )

    def is_quantized(self, words: Collection[str]) -> bool:
        return "weight_scale" in words

    def open(self, module: Module) -> PackedTensor:
        if "weight_packed" in module.tensors:
            return _open_packed(module)
        weight = module.take("weight", "F8_E4M3", "I8")
        code = Code.INT8 if weight.get_dtype() == "I8" else Code.FP8
        matrix = scaled_matrix(module, weight, code, "weight_scale", self.block)
        if "weight_zero_point" in module.tensors and code is Code.INT8:
            _check_symmetric(module)
        rounds = code is Code.FP8 and matrix.scheme.columns in self.row_groups
        return rounding_rows(matrix) if rounds else matrix


def _open_packed(module: Module) -> PackedTensor:
    packed = module.take("weight_packed", "I32")
    scale = module.take("weight_scale", *SCALE_TYPES)
    num_rows, num_inputs = (int(size) for size in module.take("weight_shape", "I64", "I32")[:])
    per_word = num_inputs // max(1, packed.get_shape()[1])
    is_wide = per_word == 4
    module.check_shape("weight_packed", num_rows, num_inputs // (4 if is_wide else 8))
    num_groups = scale.get_shape()[-1]
    module.check_shape("weight_scale", num_rows, num_groups)
    columns = None if num_groups == 1 else num_inputs // num_groups
    module.refuse_order("weight_g_idx", num_inputs, columns or num_inputs)
    code = Code.INT8 if is_wide else Code.UINT4
    zeros = None if is_wide else _zeros(module, num_rows, num_groups)
    if is_wide and "weight_zero_point" in module.tensors:
        _check_symmetric(module)
    scheme = Scheme(code, columns, scale=SCALE_TYPES[scale.get_dtype()])
    if not is_wide:
        scheme = replace(scheme, zero=0 if zeros else OFFSET, has_zeros=zeros is not None)
    read = _read_bytes if is_wide else _read_nibbles
    return PackedTensor(
        scheme,
        Rows((num_rows, num_inputs), lambda start, stop: read(packed, start, stop)),
        Rows((num_rows, num_groups), lambda start, stop: scale[start:stop]),
        zeros,
    )


def _read_nibbles(packed: Slice, start: int, stop: int) -> NDArray[np.uint8]:
    return unpack_nibbles(packed[start:stop]).reshape(stop - start, -1)


def _read_bytes(packed: Slice, start: int, stop: int) -> NDArray[np.int8]:
    return (np.ascontiguousarray(packed[start:stop]).view(np.uint8) ^ 128).view(np.int8)


def _zeros(module: Module, num_rows: int, num_groups: int) -> Rows | None:
    """Zero points [out / 8, group] with eight outputs in an int32, or, as older versions wrote them, int8."""
    if "weight_zero_point" not in module.tensors:
        return None
    stored = module.take("weight_zero_point", "I32", "I8")
    shape = (num_rows, num_groups)
    if stored.get_dtype() == "I8":
        module.check_shape("weight_zero_point", *shape)
        return Rows(shape, lambda start, stop: stored[start:stop].view(np.uint8) + np.uint8(OFFSET))
    module.check_shape("weight_zero_point", -(-num_rows // 8), num_groups)

    def read(start: int, stop: int) -> NDArray[np.uint8]:
        first = start // 8
        codes = unpack_nibbles(stored[first : -(-stop // 8)])  # [out / 8, group, 8]
        rows = codes.transpose(0, 2, 1).reshape(-1, num_groups)
        return np.ascontiguousarray(rows[start - 8 * first : stop - 8 * first])

    return Rows(shape, read)


def _check_symmetric(module: Module) -> None:
    """Refuses eight-bit zero points unless all of them are zero; they are stored even then."""
    if np.any(np.asarray(module.tensors["weight_zero_point"][:])):
        raise StartupError(f"{module.name} has zero points for eight-bit numbers, which is not supported")


def read_compressed(fields: Fields) -> Compressed:
    fields.require(
        {
            "format": FORMATS,
            "kv_cache_scheme": (None,),
            "sparsity_config": ({}, None),
            "transform_config": ({}, None),
        }
    )
    groups = [fields.mapping("config_groups").mapping(name) for name in _group_names(fields)]
    blocks = {_read_group(group) for group in groups} - {None}
    if len(blocks) > 1:
        raise fields.refused("config_groups")
    of_rows = [_read_row_groups(group) for group in groups]
    # A layer's tensors do not show which group it is in, so all groups must agree.
    return Compressed(next(iter(blocks), None), of_rows[0] if len(set(of_rows)) == 1 else ())


def _group_names(fields: Fields) -> list[str]:
    return list(fields.mapping("config_groups").values)


def _read_group(group: Fields) -> Block | None:
    """The size of the blocks in a group of layers; refuses a group whose layers cannot be read."""
    group.require({"format": FORMATS, "output_activations": (None,)})
    weights = group.mapping("weights")
    if (weights.get("num_bits"), weights.get("type")) not in KINDS:
        raise group.refused("weights")
    weights.require(
        {
            "strategy": ("tensor", "channel", "group", "block"),
            "dynamic": (False, None),
            "actorder": (None, "static", "weight"),
        }
    )
    return read_block(weights, "block_structure") if weights.get("strategy") == "block" else None


def _read_row_groups(group: Fields) -> tuple[int | None, ...]:
    """Inputs that share a scale in these layers' activations; empty unless they are dynamic FP8."""
    if group.get("input_activations") is None:
        return ()
    rows = group.mapping("input_activations")
    kind = (rows.get("num_bits"), rows.get("type"), rows.get("dynamic"))
    if kind != (8, "float", True):
        return ()
    if rows.get("strategy") == "token":
        return (None,)
    return (rows.integer("group_size"),) if rows.get("strategy") == "group" else ()
