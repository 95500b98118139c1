"""Checkpoints quantized in every format that can be kept as stored, made from a golden model.

Codes are packed as the formats' published descriptions say, and the weights that they represent are computed
in float32 by each format's own formula. So the folder `plain` in each checkpoint holds the same weights as an
ordinary checkpoint in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Array = NDArray[Any]
BFLOAT16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
GROUP = 32


class Made(NamedTuple):
    """A quantized matrix: its tensors by the last word of their names, and the weights they represent."""

    tensors: dict[str, Array]
    numbers: Array


class Example(NamedTuple):
    config: dict[str, Any]
    make: Callable[[Array], Made]


def pack(codes: Array, axis: int, order: list[int] | None = None, bits: int = 4) -> Array:
    """Packs codes into int32 along an axis, 32 / bits in each, the first lowest unless an order is given."""
    codes = np.moveaxis(codes.astype(np.int64), axis, -1)
    per_word = 32 // bits
    *outer, size = codes.shape
    padded = np.zeros((*outer, -(-size // per_word) * per_word), np.int64)
    padded[..., :size] = codes
    words = np.zeros((*outer, padded.shape[-1] // per_word), np.int64)
    for place in range(per_word):
        taken = place if order is None else order[place]
        words |= padded[..., taken::per_word] << (bits * place)
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


def grouped(matrix: Array, group: int) -> Array:
    return matrix.reshape(len(matrix), -1, group)


def four_bits(matrix: Array, group: int, dtype: Any = np.float16) -> tuple[Array, Array, Array, Array]:
    """Codes [out, in], scales and zero points [out, group], and the weights that they represent."""
    parts = grouped(matrix, group)
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    scale = ((high - low) / 15).astype(dtype)
    wide = scale.astype(np.float32)
    zero = np.clip(np.round(-low / wide), 0, 15).astype(np.int64)
    codes = np.clip(np.round(parts / wide[..., None]) + zero[..., None], 0, 15).astype(np.int64)
    numbers = (codes - zero[..., None]).astype(np.float32) * wide[..., None]
    return codes.reshape(matrix.shape), scale, zero, numbers.reshape(matrix.shape)


def awq(group: int) -> Example:
    def make(matrix: Array) -> Made:
        width = matrix.shape[1] if group == -1 else group
        codes, scale, zero, numbers = four_bits(matrix, width)
        packed = {
            "qweight": pack(codes.T, 1, AWQ_ORDER),
            "qzeros": pack(zero.T, 1, AWQ_ORDER),
            "scales": np.ascontiguousarray(scale.T),
        }
        return Made(packed, numbers)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Example(config, make)


def gptq(checkpoint_format: str) -> Example:
    def make(matrix: Array) -> Made:
        codes, scale, zero, numbers = four_bits(matrix, GROUP)
        stored = zero if checkpoint_format == "gptq_v2" else (zero - 1) & 15
        packed = {
            "qweight": pack(codes.T, 0),
            "qzeros": pack(stored.T, 1),
            "scales": np.ascontiguousarray(scale.T),
            "g_idx": np.arange(matrix.shape[1], dtype=np.int32) // GROUP,
        }
        return Made(packed, numbers)

    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
    return Example(config | {"checkpoint_format": checkpoint_format}, make)


def eight_bits(matrix: Array, scale: Array, rows: int, columns: int, dtype: Any) -> tuple[Array, Array]:
    """Codes with a scale for each block, and the weights that they represent."""
    wide = np.repeat(np.repeat(scale.astype(np.float32), rows, 0), columns, 1)
    wide = wide[: matrix.shape[0], : matrix.shape[1]]
    scaled = matrix / wide
    codes = np.round(scaled).astype(dtype) if dtype == np.int8 else scaled.astype(dtype)
    return codes, codes.astype(np.float32) * wide


def block_scales(matrix: Array, rows: int, columns: int, largest: float, dtype: Any) -> Array:
    blocks = (-(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns))
    scale = np.empty(blocks, np.float32)
    for row, column in np.ndindex(*blocks):
        block = matrix[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
        # A little larger than needed, so that a rounded scale keeps the largest weight within range.
        scale[row, column] = np.abs(block).max() / largest * 1.01
    return scale.astype(dtype)


def fp8(block: list[int] | None, dtype: Any = np.float32, activations: str = "dynamic") -> Example:
    def make(matrix: Array) -> Made:
        rows, columns = block or matrix.shape
        scale = block_scales(matrix, rows, columns, 448, dtype)
        codes, numbers = eight_bits(matrix, scale, rows, columns, FP8)
        if block is None:
            return Made({"weight": codes, "weight_scale": scale.reshape(())}, numbers)
        return Made({"weight": codes, "weight_scale_inv": scale}, numbers)

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": activations}
    return Example(config | {"weight_block_size": block}, make)


def compressed(form: str, make: Callable[[Array], Made], **weights: Any) -> Example:
    weights = {"dynamic": False, "symmetric": True, "strategy": "channel", "actorder": None} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    return Example(config, make)


def by_block(largest: float, dtype: Any, rows: int, columns: int) -> Callable[[Array], Made]:
    """FP8 or INT8 with scales for blocks; a size of 0 is the whole axis."""

    def make(matrix: Array) -> Made:
        size = (rows or matrix.shape[0], columns or matrix.shape[1])
        scale = block_scales(matrix, *size, largest, BFLOAT16)
        codes, numbers = eight_bits(matrix, scale, *size, dtype)
        return Made({"weight": codes, "weight_scale": scale.reshape(-1) if not rows else scale}, numbers)

    return make


def packed_signed(matrix: Array, bits: int) -> Made:
    """Symmetric: codes begin at -8 or -128, and 8 or 128 is added when they are packed."""
    half = 1 << (bits - 1)
    scale = block_scales(matrix, 1, GROUP, half - 1, BFLOAT16)
    codes, numbers = eight_bits(matrix, scale, 1, GROUP, np.int8)
    tensors = {"weight_packed": pack(codes.astype(np.int64) + half, 1, bits=bits), "weight_scale": scale}
    return Made(tensors | {"weight_shape": np.asarray(matrix.shape, np.int64)}, numbers)


def packed_with_zeros(matrix: Array) -> Made:
    codes, scale, zero, numbers = four_bits(matrix, GROUP, BFLOAT16)
    tensors = {
        "weight_packed": pack(codes, 1),
        "weight_scale": scale,
        "weight_zero_point": pack(zero, 0),
        "weight_shape": np.asarray(matrix.shape, np.int64),
    }
    return Made(tensors, numbers)


FP8_KIND = {"num_bits": 8, "type": "float"}
INT4_KIND = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
EXAMPLES: dict[str, Example] = {
    "awq": awq(GROUP),
    "awq-rows": awq(-1),
    "gptq": gptq("gptq"),
    "gptq-v2": gptq("gptq_v2"),
    "fp8-blocks": fp8([32, 32], BFLOAT16),
    "fp8-static": fp8([32, 32], BFLOAT16, "static"),
    "fp8-128": fp8([128, 128]),
    "fp8-tensor": fp8(None),
    "ct-fp8-channel": compressed("float-quantized", by_block(448, FP8, 1, 0), **FP8_KIND),
    "ct-fp8-tensor": compressed("float-quantized", by_block(448, FP8, 0, 0), strategy="tensor", **FP8_KIND),
    "ct-fp8-blocks": compressed(
        "float-quantized", by_block(448, FP8, 32, 32), strategy="block", block_structure=[32, 32], **FP8_KIND
    ),
    "ct-int8": compressed("int-quantized", by_block(127, np.int8, 1, 0), num_bits=8, type="int"),
    "ct-w4a16": compressed("pack-quantized", lambda matrix: packed_signed(matrix, 4), **INT4_KIND),
    "ct-w4a16-zeros": compressed("pack-quantized", packed_with_zeros, **INT4_KIND | {"symmetric": False}),
    "ct-w8a16": compressed(
        "pack-quantized", lambda matrix: packed_signed(matrix, 8), **INT4_KIND | {"num_bits": 8}
    ),
}


def is_matrix(name: str) -> bool:
    """Whether a format quantizes the tensor: a matrix of a linear layer other than the head."""
    return "_proj.weight" in name


def quantize_folder(source: Path, into: Path, example: Example) -> Path:
    """Writes a quantized copy of a checkpoint and, in its folder `plain`, the weights that it represents."""
    plain, tensors = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not is_matrix(name):
            plain[name] = tensors[name] = tensor
            continue
        made = example.make(tensor.astype(np.float32))
        plain[name] = made.numbers
        for word, array in made.tensors.items():
            tensors[f"{name.removesuffix('weight')}{word}"] = array
    for folder, saved, extra in (
        (into, tensors, {"quantization_config": example.config}),
        (into / "plain", plain, {}),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.glob("tokenizer*.json"):
            shutil.copy(file, folder)
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | extra))
        save_file(
            {name: np.ascontiguousarray(array) for name, array in saved.items()}, folder / "model.safetensors"
        )
    return into
