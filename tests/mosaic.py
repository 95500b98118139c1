"""Tells whether jax can interpret Mosaic GPU's kernels on a machine without a GPU."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

from tests.node import NotAvailable


def find_interpreter() -> Path:
    """The interpreter in jax 0.10, not public yet, hangs on kernels whose warp groups wait for each other."""
    found = importlib.util.find_spec("jax")
    if found is None or found.origin is None or version("jax").startswith("0.10."):
        raise NotAvailable("jax interprets Mosaic GPU's kernels from 0.11 on")
    return Path(found.origin)
