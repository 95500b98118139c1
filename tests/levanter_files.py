"""Levanter checkpoints for tests: reads a golden one, and writes others in the older layout of jax 0.4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

Arrays = dict[str, np.ndarray]


def read_model(folder: Path) -> Arrays:
    """The model's arrays in an OCDBT checkpoint, by path."""
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
    keys = [key.decode() for key in ts.KvStore.open(base).result().list().result()]
    paths = [
        key.removesuffix("/zarr.json")
        for key in keys
        if key.startswith("model/") and key.endswith("/zarr.json")
    ]
    return {path: np.asarray(_open("zarr3", base | {"path": f"{path}/"}).read().result()) for path in paths}


def write_checkpoint(
    folder: Path,
    arrays: Mapping[str, np.ndarray],
    step: int,
    *,
    chunks: Mapping[str, list[int]] | None = None,
    **extra: object,
) -> Path:
    """Writes a zarr folder for each array, then metadata.json, which says that the checkpoint is complete."""
    for path, array in arrays.items():
        shape = (chunks or {}).get(path, list(array.shape))
        metadata: dict[str, Any] = {
            "shape": array.shape,
            "chunks": shape,
            "compressor": {"id": "zstd"},
            **extra,
        }
        kvstore = {"driver": "file", "path": f"{folder / path}/"}
        spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata, "dtype": array.dtype.name}
        ts.open(spec, create=True, delete_existing=True).result().write(array).result()
    (folder / "metadata.json").write_text(
        json.dumps({"step": step, "timestamp": "2024-03-01T12:00:00", "is_temporary": False})
    )
    return folder


def _open(driver: str, kvstore: dict[str, Any]) -> Any:
    return ts.open({"driver": driver, "kvstore": kvstore}, read=True, open=True).result()
