"""Reads the tensors of a GGUF file and decodes its quantized blocks.

llama.cpp's rotary positions pair neighbouring rows of a head, Hugging Face's pair one half with the other. So
llama.cpp's converter interleaves the q and k rows of some architectures; here they get Hugging Face's order
back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.gguf.header import TensorEntry, read_header
from levserve.weights.quantized.gguf import open_blocks
from levserve.weights.stored_tensor import ALL, StoredTensor

UNQUANTIZED = (Kind.F32, Kind.F16, Kind.BF16)
# In a K-quant file, llama.cpp stores rows whose length is not a multiple of 256 as Q5_0, Q5_1 or IQ4_NL.
KINDS = (
    *UNQUANTIZED,
    Kind.Q8_0,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q2_K,
    Kind.Q3_K,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
    Kind.IQ4_NL,
    Kind.IQ4_XS,
    Kind.MXFP4,
)
INTERLEAVED_ARCHITECTURES = ("llama", "granite", "command-r")
SHARED_GATE = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")
INTERLEAVED_NAME = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in a mapped GGUF file; `interleaved_head` is the head size if its rows are interleaved."""

    entry: TensorEntry
    interleaved_head: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def read(self, start: int, stop: int, columns: slice = ALL) -> NDArray[np.generic]:
        size, num_bytes = GGML_QUANT_SIZES[self.entry.kind]
        part = ALL
        if columns != ALL and columns.start % size == columns.stop % size == 0:
            part = slice(columns.start // size * num_bytes, columns.stop // size * num_bytes)
            columns = ALL
        packed = self.read_bytes(start, stop, part)
        decoded = _decode(packed.reshape(-1), self.entry.kind)
        if len(self.shape) == 2:
            return decoded.reshape(stop - start, -1)[:, columns]
        return decoded.reshape(stop - start, *self.shape[1:])

    def read_bytes(self, start: int, stop: int, part: slice = ALL) -> NDArray[np.uint8]:
        """The stored bytes of these rows, [row, byte]; `part` selects bytes of each row."""
        rows = self.entry.data.reshape(self.shape[0], -1)[:, part]
        if self.interleaved_head is None:
            return rows[start:stop]
        return rows[interleaved_rows(np.arange(start, stop), self.interleaved_head)]

    def finish(self) -> None:
        """Does nothing: the file stays mapped."""


def read_tensors(path: Path, head_dim: int) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of the file, in file order."""
    header = read_header(path)
    is_interleaved = header.metadata.get("general.architecture") in INTERLEAVED_ARCHITECTURES
    for name, entry in header.tensors.items():
        _check_entry(path, name, entry)
        if SHARED_GATE.fullmatch(name) and len(entry.shape) == 1:
            entry = replace(entry, shape=(1, *entry.shape))  # llama.cpp has a vector in place of the matrix
        has_heads = is_interleaved and INTERLEAVED_NAME.fullmatch(name)
        tensor = GGUFTensor(entry, head_dim if has_heads else None)
        yield name, open_blocks(entry.kind, tensor, tensor.read_bytes)


def is_quantized(path: Path) -> bool:
    """Whether any tensor of the file has eight bits or fewer per weight."""
    return any(entry.kind not in UNQUANTIZED for entry in read_header(path).tensors.values())


def interleaved_rows(rows: NDArray[np.int64], head_dim: int) -> NDArray[np.int64]:
    """Where llama.cpp stores these rows: Hugging Face's row (half, pair) of a head is at (pair, half)."""
    head, row = np.divmod(rows, head_dim)
    half, pair = np.divmod(row, head_dim // 2)
    return np.asarray(head * head_dim + pair * 2 + half)


def _check_entry(path: Path, name: str, entry: TensorEntry) -> None:
    if entry.kind not in KINDS:
        supported = ", ".join(kind.name for kind in KINDS)
        raise StartupError(f"{path}: {name} is stored as {entry.kind.name}; supported are {supported}")
    row_size = entry.shape[-1] if len(entry.shape) > 1 else 1
    if row_size % GGML_QUANT_SIZES[entry.kind][0]:
        raise StartupError(f"{path}: {name} has rows of {row_size}, which {entry.kind.name} cannot store")


def _decode(packed: NDArray[np.uint8], kind: Kind) -> NDArray[np.generic]:
    if kind is Kind.BF16:
        return packed.view(ml_dtypes.bfloat16)
    from levserve.weights.gguf_blocks import CODES, decode_blocks  # imports LLVM

    if kind in CODES:
        return decode_blocks(packed, kind)
    # The package decodes 16 rows at a time; a block passed as one row is decoded in one set of numpy calls.
    return dequantize(packed.reshape(1, -1), kind)
