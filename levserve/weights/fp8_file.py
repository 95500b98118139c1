"""Reads a safetensors file's FP8 tensors, which the package cannot give to numpy: numpy has no such type."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from levserve.weights.stored_tensor import ArraySlice

FP8_TYPES = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}


class Fp8File:
    """A mapped file, whose header the package has checked."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._entries = json.loads(file.read(size))
        self._data = np.memmap(path, np.uint8, mode="r", offset=0)[8 + size :]

    def slice(self, name: str) -> ArraySlice:
        entry = self._entries[name]
        start, stop = entry["data_offsets"]
        return ArraySlice(self._data[start:stop].view(FP8_TYPES[entry["dtype"]]).reshape(entry["shape"]))
