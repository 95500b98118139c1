"""Reads the experts of gpt-oss in the order in which other families store them.

Their matrices are stored [expert, in, out], with the rows of gate and up interleaved. The published
checkpoints pack them in MXFP4 instead: [expert, out, in] in four bits, with a power of two as the scale of
each 32 weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.model.packed import Code, Scheme
from levserve.weights.quantized.packed_tensor import PackedTensor, Rows
from levserve.weights.stored_tensor import ALL, Slice, StoredTensor

EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
PACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.(?:gate_up|down)_proj)_(blocks|scales)")
GROUP = 32
"""Weights that share a scale."""


class TransposedTensor:
    """Matrices that are stored [expert, in, out], read as [expert, out, in]."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        experts, inputs, outputs = stored.shape
        self.shape = (experts, outputs, inputs)

    def read(self, start: int, stop: int, columns: slice = ALL) -> NDArray[np.generic]:
        assert columns == ALL  # only two-dimensional tensors are read by columns
        return self._stored.read(start, stop).transpose(0, 2, 1)

    def finish(self) -> None:
        self._stored.finish()


class GateUpTensor:
    """Interleaved rows, or biases, of gate and up, read as all of gate, then all of up."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self.shape = stored.shape

    def read(self, start: int, stop: int, columns: slice = ALL) -> NDArray[np.generic]:
        found = self._stored.read(start, stop)
        return np.concatenate([found[:, ::2], found[:, 1::2]], axis=1)[:, columns]

    def finish(self) -> None:
        self._stored.finish()


def arrange_expert(name: str, stored: StoredTensor) -> StoredTensor:
    """A tensor of gpt-oss's experts in the order of other families; any other tensor unchanged."""
    match = EXPERTS.fullmatch(name)
    if match is None:
        return stored
    is_fused, is_bias = match[1] == "gate_up", match[2] is not None
    transposed = stored if is_bias or len(stored.shape) != 3 else TransposedTensor(stored)
    return GateUpTensor(transposed) if is_fused else transposed


def unpack_experts(source: str, packed: Mapping[str, Slice]) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices in tensors whose names match `PACKED`: for each matrix one of blocks and one of scales."""
    names = {match[1] for match in map(PACKED.fullmatch, packed) if match}
    for name in sorted(names):
        blocks, scales = (_packed_part(source, f"{name}_{part}", packed) for part in ("blocks", "scales"))
        shape = blocks.get_shape()
        if len(shape) != 4 or 2 * shape[-1] != GROUP or shape[:-1] != scales.get_shape():
            raise StartupError(f"{source}: {name} has blocks {shape} and scales {scales.get_shape()}")
        tensor = _open_packed(blocks, scales)
        yield name, tensor.with_parts(GateUpTensor) if "gate_up" in name else tensor


def _open_packed(blocks: Slice, scales: Slice) -> PackedTensor:
    """Opens matrices of bytes [expert, out, group, 16], lower halves first, with their scales."""
    experts, rows, groups, _ = blocks.get_shape()

    def read_codes(start: int, stop: int) -> NDArray[np.generic]:
        packed = blocks[start:stop].view(np.uint8)
        codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
        return codes.reshape(stop - start, rows, groups * GROUP)

    return PackedTensor(
        Scheme(Code.E2M1, columns=GROUP, scale=jnp.dtype(jnp.uint8)),
        Rows((experts, rows, groups * GROUP), read_codes),
        Rows((experts, rows, groups), lambda start, stop: scales[start:stop]),
    )


def _packed_part(source: str, name: str, packed: Mapping[str, Slice]) -> Slice:
    if name not in packed:
        raise StartupError(f"{source}: {name} is missing")
    if packed[name].get_dtype() != "U8":
        raise StartupError(f"{source}: {name} is stored as {packed[name].get_dtype()}; expected U8")
    return packed[name]
