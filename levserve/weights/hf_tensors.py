"""Reads the tensors of a Hugging Face folder: one safetensors file, or shards listed in an index.

The safetensors library maps the files into memory; rows are copied only when they are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors needs (0.5 to 0.8 tried)
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from levserve.errors import StartupError
from levserve.weights.stored_tensor import StoredTensor
from levserve.weights.tensor_names import TRANSPOSED

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
# Masks in GPT-2's files, and the part of Gemma 3 that reads images.
SKIPPED = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|(model\.)?(vision_tower|multi_modal_projector)\..*"
)


class _Slice(Protocol):
    """What we use of safetensors' lazy tensor, which keeps the file mapped after it is closed."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, part: slice | tuple[slice, slice]) -> NDArray[np.generic]: ...


class SafetensorsTensor:
    """A tensor in a mapped safetensors file; a transposed one is stored [in, out]."""

    def __init__(self, mapped: _Slice, *, is_transposed: bool) -> None:
        self._mapped = mapped
        self._is_transposed = is_transposed
        shape = tuple(mapped.get_shape())
        self.shape = shape[::-1] if is_transposed else shape

    def read(self, start: int, stop: int) -> NDArray[np.generic]:
        rows = self._mapped[:, start:stop].T if self._is_transposed else self._mapped[start:stop]
        # numpy takes 2.6 ns to convert a float16 to bfloat16, and 1 ns to do it through float32.
        return rows.astype(np.float32) if rows.dtype == np.float16 else rows


def read_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of the checkpoint in `folder`, under its name in the table of tensor names."""
    for path in find_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  it is no dict
                    if not SKIPPED.fullmatch(name):
                        yield plain_name(name), _tensor(path, name, file.get_slice(name))
        except (OSError, SafetensorError) as error:
            raise StartupError(f"cannot read {path}: {error}") from error


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes of some files of GPT-2 and of Gemma 3 with images."""
    name = re.sub(r"^(transformer|language_model)\.", "", name)
    return re.sub(r"^model\.language_model\.", "model.", name)


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of the checkpoint; a folder may hold others, such as a consolidated copy."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder / INDEX_FILE)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        others = f"{len(files)} other .safetensors files"
        raise StartupError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}, and {others}")
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StartupError(
            f"cannot read {index}: expected a table weight_map of tensors and files"
        ) from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise StartupError(f"{index} lists files that do not exist: {', '.join(missing)}")
    return [index.parent / name for name in names]


def _tensor(path: Path, name: str, mapped: _Slice) -> SafetensorsTensor:
    dtype = mapped.get_dtype()
    if dtype not in DTYPES:
        raise StartupError(f"{path}: {name} is stored as {dtype}; supported are {', '.join(DTYPES)}")
    return SafetensorsTensor(mapped, is_transposed=TRANSPOSED.fullmatch(plain_name(name)) is not None)
