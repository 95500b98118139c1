"""Adds a LoRA adapter to the tensors of a Hugging Face checkpoint while they are read.

For a matrix W the adapter has two low-rank matrices, B and A, and W + scale * B @ A is served. The sum is
computed in float32 for the rows that are read, before tensors are joined, balanced or quantized, so no later
step needs to know about adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.model.config import ModelConfig
from levserve.weights.adapter_folder import AdapterConfig, read_adapter_config, weight_file
from levserve.weights.hf_tensors import check_dtype, plain_name, read_file
from levserve.weights.stored_tensor import ALL, Slice
from levserve.weights.tensor_names import TRANSPOSED

PREFIX = "base_model.model."
LOW_RANK = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")
SAVED = re.compile(r"\.modules_to_save(\.default)?(?=\.)")
UNSUPPORTED = re.compile(r".*\.lora_\w+|.*\.(base_layer|original_module)\..*")
TIED = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "wte.weight",
    "gpt_neox.embed_in.weight",
    "embed_out.weight",
)
"""Embeddings and heads."""
MAX_NAMES_SHOWN = 8


@dataclass(slots=True)
class Adapter:
    """An adapter's tensors, by the plain name of the base model's tensor that each of them changes."""

    source: str
    halves: dict[str, dict[str, Slice]] = field(default_factory=dict)
    """A and B of each matrix."""
    modules: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, Slice] = field(default_factory=dict)


def merge_adapter(
    folder: Path, found: Iterable[tuple[str, Slice]], config: ModelConfig
) -> Iterator[tuple[str, Slice]]:
    """The tensors with the adapter merged in. Raises `StartupError` if part of it fits none of them."""
    how = read_adapter_config(folder)
    adapter = _read_adapter(weight_file(folder))
    if config.tied_head and (shared := [*_named(adapter, TIED)]):
        raise StartupError(
            f"{adapter.source}: {shared[0]} is not supported: the base model's head is tied to its embedding"
        )
    left = {*adapter.halves, *adapter.replaced}
    for stored_name, stored in found:
        name = plain_name(stored_name)
        left.discard(name)
        if name in adapter.replaced:
            yield stored_name, _replacement(adapter, name, stored)
        elif name in adapter.halves:
            yield stored_name, _merged(adapter, how, name, stored)
        else:
            yield stored_name, stored
    if left:
        names = sorted(left)
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        raise StartupError(
            f"{adapter.source} changes tensors that the model does not have: "
            f"{', '.join(names[:MAX_NAMES_SHOWN])}{more}; is it an adapter of another model?"
        )


class MergedSlice:
    """A stored matrix; what is read has the product of two small matrices added to it."""

    def __init__(
        self, stored: Slice, left: NDArray[np.float32], right: NDArray[np.float32], scale: float
    ) -> None:
        self._stored = stored
        self._left = left * np.float32(scale)
        self._right = right

    def get_shape(self) -> list[int]:
        return list(self._stored.get_shape())

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, part: slice | tuple[slice, ...]) -> NDArray[np.generic]:
        rows, columns = (*part, ALL)[:2] if isinstance(part, tuple) else (part, ALL)
        numbers = self._stored[part].astype(np.float32)
        numbers += self._left[rows] @ self._right[:, columns]
        return numbers


def _read_adapter(path: Path) -> Adapter:
    adapter = Adapter(str(path))
    for name, stored in read_file(path):
        if not name.startswith(PREFIX):
            raise StartupError(f"{path}: {name} does not begin with {PREFIX}, as PEFT's names do")
        inner = name.removeprefix(PREFIX)
        check_dtype(path, name, stored)
        half = LOW_RANK.fullmatch(inner)
        if half is not None:
            target = plain_name(f"{half['module']}.weight")
            adapter.halves.setdefault(target, {})[half["half"]] = stored
            adapter.modules[target] = half["module"]
        elif UNSUPPORTED.fullmatch(inner):
            raise StartupError(f"{path}: {name} is not supported: only lora_A and lora_B of matrices are")
        else:
            adapter.replaced[plain_name(SAVED.sub("", inner))] = stored
    return adapter


def _named(adapter: Adapter, names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if name in adapter.halves or name in adapter.replaced)


def _replacement(adapter: Adapter, name: str, stored: Slice) -> Slice:
    if name in adapter.halves:
        raise StartupError(
            f"{adapter.source}: {name} is both replaced (modules_to_save) and changed by lora_A and lora_B"
        )
    given = adapter.replaced[name]
    if given.get_shape() != stored.get_shape():
        raise StartupError(
            f"{adapter.source}: {name} has the shape {given.get_shape()}, and {stored.get_shape()} in the "
            "base model; embeddings of another size are not supported: merge the adapter with PEFT"
        )
    return given


def _merged(adapter: Adapter, how: AdapterConfig, name: str, stored: Slice) -> Slice:
    check_dtype(f"{adapter.source}: the base model", name, stored)
    halves, module = adapter.halves[name], adapter.modules[name]
    if missing := {"A", "B"} - halves.keys():
        raise StartupError(f"{adapter.source}: {module} has no lora_{missing.pop()}.weight")
    first, second = (np.asarray(halves[half][ALL]).astype(np.float32) for half in "AB")
    rank = how.rank_of(module)
    is_transposed = TRANSPOSED.fullmatch(name) is not None
    outs, ins = stored.get_shape()[:: -1 if is_transposed else 1]
    if first.shape != (rank, ins) or second.shape != (outs, rank):
        raise StartupError(
            f"{adapter.source}: lora_A and lora_B of {module} have the shapes {[*first.shape]} and "
            f"{[*second.shape]}, expected {[rank, ins]} and {[outs, rank]} (r, rank_pattern)"
        )
    for half, numbers in (("A", first), ("B", second)):
        if not np.isfinite(numbers).all():
            raise StartupError(f"{adapter.source}: lora_{half} of {module} has values that are not finite")
    scale = how.scale_of(module)
    if is_transposed:
        return MergedSlice(stored, first.T, second.T, scale)
    return MergedSlice(stored, second, first, scale)
