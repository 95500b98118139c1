"""Reads the tensors of a Hugging Face folder: one file, or shards listed in an index.

The files are safetensors, or, in older repositories, PyTorch's own. Both are mapped into memory; rows are
copied only when they are read.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors needs (0.5 to 0.8 tried)
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from levserve.errors import StartupError, cause_of
from levserve.gguf.pointer import describe_pointer
from levserve.model.config import ModelConfig
from levserve.weights.fp8_file import FP8_TYPES, Fp8File
from levserve.weights.gpt_oss_tensors import PACKED, arrange_expert, unpack_experts
from levserve.weights.row_order import ReorderedTensor, row_order
from levserve.weights.stored_tensor import ALL, ArraySlice, Slice, StoredTensor
from levserve.weights.tensor_names import BY_HEAD, TRANSPOSED
from levserve.weights.torch_file import read_state_dict

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TORCH_SUFFIXES = (".bin", ".pt")
DTYPES = ("F32", "F16", "BF16")
# Attention masks in the files of GPT-2 and GPT-NeoX, and the part of Gemma 3 that reads images.
SKIPPED = re.compile(
    r"((transformer\.)?h|gpt_neox\.layers)\.\d+\.(attn|attention)\.(masked_)?bias"
    r"|(model\.)?(vision_tower|multi_modal_projector)\..*"
)


class HfTensor:
    """A tensor in a mapped file.

    A transposed tensor is stored [in, out]. A tensor stored by heads of `by_head` rows has the query, key and
    value of the first head, then those of the second, and so on; it is read as all queries, all keys, all
    values.
    """

    def __init__(self, mapped: Slice, *, is_transposed: bool = False, by_head: int | None = None) -> None:
        self._mapped = mapped
        self._is_transposed = is_transposed
        self._by_head = by_head
        shape = tuple(mapped.get_shape())
        self.shape = shape[::-1] if is_transposed else shape

    def read(self, start: int, stop: int, columns: slice = ALL) -> NDArray[np.generic]:
        rows = self._read_stored(start, stop, columns)
        # numpy takes 2.6 ns to convert a float16 to bfloat16, and 1 ns to do it through float32.
        return rows.astype(np.float32) if rows.dtype == np.float16 else rows

    def finish(self) -> None:
        """Does nothing: the file stays mapped."""

    def _read_stored(self, start: int, stop: int, columns: slice) -> NDArray[np.generic]:
        if self._is_transposed:
            return self._mapped[columns, start:stop].T
        if self._by_head is None:
            return self._mapped[start:stop] if columns == ALL else self._mapped[start:stop, columns]
        assert columns == ALL  # tensors stored by heads are cut by heads, which are rows
        return np.concatenate([self._mapped[place] for place in self._places(start, stop, self._by_head)])

    def _places(self, start: int, stop: int, head_dim: int) -> Iterator[slice]:
        """Where these rows of a tensor stored by heads are in the file: a slice for each contiguous run."""
        while start < stop:
            part, row = divmod(start, self.shape[0] // 3)
            head, number = divmod(row, head_dim)
            count = min(head_dim - number, stop - start)
            place = (3 * head + part) * head_dim + number
            yield slice(place, place + count)
            start += count


def read_tensors(folder: Path, config: ModelConfig) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of the checkpoint in `folder`, under its name in the table of tensor names."""
    files = find_files(folder)
    source = str(files[0] if len(files) == 1 else folder)
    return arrange_tensors(source, read_files(files), config)


def arrange_tensors(
    source: str, found: Iterable[tuple[str, Slice]], config: ModelConfig
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors with their rows in the order of the model's arrays; `source` is for errors."""
    packed: dict[str, Slice] = {}
    for name, stored in found:
        if SKIPPED.fullmatch(name):
            continue
        if config.has_transposed_experts and PACKED.fullmatch(name):
            packed[name] = stored
            continue
        tensor: StoredTensor = _tensor(source, name, stored, config.head_dim)
        order = row_order(plain_name(name), config)
        if order is not None:
            tensor = ReorderedTensor(tensor, order)
        if config.has_transposed_experts:
            tensor = arrange_expert(name, tensor)
        yield plain_name(name), tensor
    yield from unpack_experts(source, packed)


def read_files(files: Iterable[Path]) -> Iterator[tuple[str, Slice]]:
    return itertools.chain.from_iterable(map(read_file, files))


def read_file(path: Path) -> Iterator[tuple[str, Slice]]:
    """The tensors of one file, by the names that they have in it."""
    if path.suffix in TORCH_SUFFIXES:
        for name, tensor in read_state_dict(path).items():
            yield name, ArraySlice(tensor.array)
        return
    fp8: Fp8File | None = None
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  it is no dict
                stored = file.get_slice(name)
                if stored.get_dtype() in FP8_TYPES:
                    fp8 = fp8 or Fp8File(path)
                    stored = fp8.slice(name)
                yield name, stored
    except OSError as error:
        raise StartupError(f"cannot read {path}: {cause_of(error)}") from error
    except SafetensorError as error:
        damage = f"cannot read {path}: the file is damaged or incomplete ({error})"
        raise StartupError(describe_pointer(path) or damage) from error


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes in some files of GPT-2 and of Gemma 3 with an image encoder."""
    name = re.sub(r"^(transformer|language_model)\.", "", name)
    return re.sub(r"^model\.language_model\.", "model.", name)


def find_files(folder: Path) -> list[Path]:
    """The checkpoint's files, safetensors if there are any; other files, such as copies, are ignored."""
    for single, index in zip(SINGLE_FILES, INDEX_FILES):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _indexed_files(folder / index)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    expected = ", ".join((*SINGLE_FILES, *INDEX_FILES))
    raise StartupError(f"{folder} has none of {expected}, and {len(files)} other .safetensors files")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(map(os.fspath, json.loads(index.read_bytes())["weight_map"].values())))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StartupError(
            f"cannot read {index}: expected a table weight_map of tensors and files"
        ) from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise StartupError(f"{index} lists files that do not exist: {', '.join(missing)}")
    return [index.parent / name for name in names]


def check_dtype(source: str | Path, name: str, mapped: Slice) -> None:
    """Refuses a tensor of an unsupported type."""
    dtype = mapped.get_dtype()
    if dtype not in DTYPES:
        raise StartupError(f"{source}: {name} is stored as {dtype}; supported are {', '.join(DTYPES)}")


def _tensor(source: str, name: str, mapped: Slice, head_dim: int) -> HfTensor:
    check_dtype(source, name, mapped)
    is_transposed = TRANSPOSED.fullmatch(plain_name(name)) is not None
    return HfTensor(
        mapped, is_transposed=is_transposed, by_head=head_dim if BY_HEAD.fullmatch(name) else None
    )
