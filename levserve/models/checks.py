"""Checks of weights before they replace those that are served, and before they are read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp

from levserve.device.sizing import free_memory
from levserve.errors import StartupError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def sum_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: jnp.dtype) -> int:
    """Bytes of all weights with matrices in this type; vectors are float32."""
    return sum(math.prod(shape) * (dtype.itemsize if len(shape) > 1 else 4) for shape in shapes.values())


def check_same_model(path: Path, served: DataclassInstance, new: DataclassInstance) -> None:
    """Refuses weights of another shape than those that are served."""
    before, after = dataclasses.asdict(served), dataclasses.asdict(new)
    changed = [key for key in before if after[key] != before[key]]
    if changed:
        differences = "; ".join(f"{key} is {after[key]}, served is {before[key]}" for key in changed)
        raise StartupError(f"{path}: another model than the one that is served: {differences}")


def check_host_memory(needed_bytes: int, free_bytes: int | None = None) -> None:
    """Refuses weights that the host cannot hold beside what it serves: the kernel would kill the server."""
    free_bytes = free_memory() if free_bytes is None else free_bytes
    needed, free = needed_bytes / 1e9, free_bytes / 1e9
    if needed > free:
        raise StartupError(
            f"the new weights take {needed:.1f} GB of the host's memory and {free:.1f} GB are free"
        )
