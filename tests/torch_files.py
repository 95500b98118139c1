"""Writes files as PyTorch does, without PyTorch: a zip archive with a pickle and the data of each storage."""

from __future__ import annotations

import io
import pickle
import sys
import types
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"}


def write_torch_file(path: Path, tensors: Mapping[str, NDArray[np.generic]]) -> Path:
    """Writes a state dict in which each tensor has its own storage."""
    return write_archive(path, dumps({name: Tensor(name, array) for name, array in tensors.items()}), tensors)


def write_archive(path: Path, pickled: bytes, storages: Mapping[str, NDArray[np.generic]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for key, array in storages.items():
            archive.writestr(f"archive/data/{key}", np.ascontiguousarray(array).tobytes())
        archive.writestr("archive/version", "3\n")
    return path


def dumps(saved: object) -> bytes:
    """A pickle in which a `Tensor` looks as PyTorch pickles its own tensors."""
    file = io.BytesIO()
    with patch.dict(sys.modules, {"torch": TORCH, "torch._utils": UTILS}):
        _Pickler(file, protocol=2).dump(saved)
    return file.getvalue()


class Tensor:
    """A tensor to be written; `key` names its storage, and `told` overrides what the array would give."""

    def __init__(self, key: str, array: NDArray[np.generic], **told: Any) -> None:
        kind = told.get("kind", getattr(TORCH, STORAGES[array.dtype.name]))
        self.storage = _Storage(("storage", kind, key, "cpu", told.get("count", array.size)))
        strides = tuple(step // array.itemsize for step in np.ascontiguousarray(array).strides)
        shape = told.get("shape", array.shape)
        self.parts = (told.get("offset", 0), shape, told.get("strides", strides), False, {})

    def __reduce__(self) -> tuple[Any, ...]:
        return UTILS._rebuild_tensor_v2, (self.storage, *self.parts)


class _Storage:
    def __init__(self, pid: tuple[Any, ...]) -> None:
        self.pid = pid


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        return obj.pid if isinstance(obj, _Storage) else None


def _rebuild_tensor_v2(*_: object) -> None:
    """Only its name is written."""


TORCH, UTILS = types.ModuleType("torch"), types.ModuleType("torch._utils")
for name in (*STORAGES.values(), "FloatStorage"):
    setattr(TORCH, name, type(name, (), {"__module__": "torch"}))
_rebuild_tensor_v2.__module__ = "torch._utils"
UTILS._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]
