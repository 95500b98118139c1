"""Tensors in fp8 of a safetensors file, which the package cannot give to numpy: numpy has no such type."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

TYPES = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}


class Fp8File:
    """A mapped file, whose header the package has checked."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._entries = json.loads(file.read(size))
        self._data = np.memmap(path, np.uint8, mode="r", offset=0)[8 + size :]

    def slice(self, name: str) -> Fp8Slice:
        entry = self._entries[name]
        start, stop = entry["data_offsets"]
        array = self._data[start:stop].view(TYPES[entry["dtype"]]).reshape(entry["shape"])
        return Fp8Slice(array, entry["dtype"])


class Fp8Slice:
    """A tensor in the form of safetensors' lazy ones."""

    def __init__(self, array: NDArray[np.generic], dtype: str) -> None:
        self._array = array
        self._dtype = dtype

    def get_shape(self) -> list[int]:
        return list(self._array.shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, part: slice | tuple[slice, ...]) -> NDArray[np.generic]:
        return np.asarray(self._array[part])
