"""Presents weights in a program's memory, such as those that it trains, as the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from levserve.errors import StartupError
from levserve.model.config import ModelConfig
from levserve.weights.checkpoint import Tensors
from levserve.weights.hf_tensors import arrange_tensors
from levserve.weights.stored_tensor import ArraySlice, Slice

SOURCE = "the given weights"


def tensors_in_memory(arrays: Mapping[str, Any], config: ModelConfig) -> Tensors:
    """The tensors for arrays named as in the model's Hugging Face checkpoint. Raises `StartupError`."""
    return Tensors(SOURCE, dict(arrange_tensors(SOURCE, _slices(arrays), config)))


def _slices(arrays: Mapping[str, Any]) -> Iterator[tuple[str, Slice]]:
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray | jax.Array):
            kind = type(array).__name__
            raise StartupError(f"{SOURCE}: {name} is a {kind}, and not an array of jax or NumPy")
        yield name, ArraySlice(array)
