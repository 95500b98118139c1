"""Weights that a program has in memory, such as those that it trains, as the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.model.config import ModelConfig
from levserve.weights.checkpoint import Tensors
from levserve.weights.hf_tensors import TORCH_DTYPES, arrange_tensors
from levserve.weights.stored_tensor import Slice

SOURCE = "the given weights"


class _ArraySlice:
    """An array of jax or NumPy. One on another device is copied to the host when its first row is read."""

    def __init__(self, array: NDArray[np.generic] | jax.Array) -> None:
        self._array = array

    def get_shape(self) -> list[int]:
        return list(self._array.shape)

    def get_dtype(self) -> str:
        name = np.dtype(self._array.dtype).name
        return TORCH_DTYPES.get(name, name)

    def __getitem__(self, part: slice | tuple[slice, ...]) -> NDArray[np.generic]:
        if not isinstance(self._array, np.ndarray):
            self._array = np.asarray(self._array)  # two threads may both do it, and then do the same
        rows: NDArray[np.generic] = self._array[part]
        return rows


def tensors_in_memory(arrays: Mapping[str, Any], config: ModelConfig) -> Tensors:
    """Arrays under the names that a Hugging Face checkpoint of the model has. Raises `StartupError`."""
    return Tensors(SOURCE, dict(arrange_tensors(SOURCE, _slices(arrays), config)))


def _slices(arrays: Mapping[str, Any]) -> Iterator[tuple[str, Slice]]:
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray | jax.Array):
            kind = type(array).__name__
            raise StartupError(f"{SOURCE}: {name} is a {kind}, and not an array of jax or NumPy")
        yield name, _ArraySlice(array)
