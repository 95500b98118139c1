"""Reads the tensors of a Hugging Face folder: one safetensors file, or shards listed in an index.

Called by the loader. Files are mapped by the safetensors library and rows copied only when read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, without which safetensors cannot give it (0.5 to 0.8 tried)
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from levserve.errors import StartupError
from levserve.weights.stored import StoredTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
# Masks that GPT-2's files carry along, and the part of Gemma 3 that sees pictures.
SKIPPED = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|(model\.)?(vision_tower|multi_modal_projector)\..*"
)
# GPT-2 keeps its matrices [in, out].
TRANSPOSED = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")


class _Slice(Protocol):
    """The part of safetensors' lazy tensor we use; it keeps the mapping alive after the file is closed."""

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
        # numpy turns float16 into bfloat16 one number at a time, 2.6 ns each; through float32 it is 1 ns.
        return rows.astype(np.float32) if rows.dtype == np.float16 else rows


def read_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of the checkpoint in `folder`, in the order of its files, under the name the table of names has."""
    for path in find_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():
                    if not SKIPPED.fullmatch(name):
                        yield plain_name(name), _tensor(path, name, file.get_slice(name))
        except (OSError, SafetensorError) as error:
            raise StartupError(f"cannot read {path}: {error}") from error


def plain_name(name: str) -> str:
    """A tensor's name without what some files put before it: GPT-2's own do not, and Gemma 3's text model may be inside another."""
    return re.sub(r"^model\.language_model\.", "model.", re.sub(r"^(transformer|language_model)\.", "", name))


def find_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint; a folder may hold others, such as Mistral's consolidated copy."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder / INDEX_FILE)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise StartupError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}, and {len(files)} other .safetensors files"
        )
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StartupError(f"cannot read {index}: no table `weight_map` of tensors and files") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise StartupError(f"{index} lists files that are not there: {', '.join(missing)}")
    return [index.parent / name for name in names]


def _tensor(path: Path, name: str, mapped: _Slice) -> SafetensorsTensor:
    if mapped.get_dtype() not in DTYPES:
        raise StartupError(
            f"{path}: {name} is stored as {mapped.get_dtype()}; supported are {', '.join(DTYPES)}"
        )
    return SafetensorsTensor(mapped, is_transposed=TRANSPOSED.fullmatch(plain_name(name)) is not None)
