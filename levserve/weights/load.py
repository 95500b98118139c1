"""Fills a model's arrays from a checkpoint, and reads what the checkpoint says about itself.

Called once at start, on the device thread. Arrays are filled one at a time: pieces of rows are decoded by a few threads and
written in the serving type straight to their place, so the host holds one copy of the weights and a few megabytes on the way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.model.config import ModelConfig, parameter_shapes
from levserve.weights import gguf, hf
from levserve.weights.gguf_config import read_gguf_config
from levserve.weights.hf_config import read_hf_config
from levserve.weights.names import Format, Target, find_targets, match_tensors
from levserve.weights.progress import Progress
from levserve.weights.stored import StoredTensor

PIECE_SIZE = 1 << 18  # numbers decoded at a time: 1 MB of float32 stays in the cache
MAX_THREADS = 8
ALIGNMENT = 64  # jax's CPU backend takes over host memory aligned like this instead of copying it


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stored tensor and what it fills."""

    tensor: StoredTensor
    target: Target


def read_config(path: Path) -> ModelConfig:
    """The model's shape, from a folder's config.json or a GGUF file's metadata."""
    config = read_hf_config(path / "config.json") if path.is_dir() else read_gguf_config(path)
    if config.num_heads % config.num_kv_heads:
        raise StartupError(f"{path}: {config.num_heads} query heads cannot share {config.num_kv_heads} key and value heads evenly")
    if config.rope_theta is not None and (config.rotary_size or config.head_dim) % 2:
        raise StartupError(f"{path}: a head size of {config.rotary_size or config.head_dim} is odd, and rotary positions need pairs")
    if config.experts_per_token > config.num_experts:
        raise StartupError(f"{path}: {config.experts_per_token} experts a token are more than the {config.num_experts} there are")
    return config


def load_arrays(path: Path, config: ModelConfig, dtype: jnp.dtype, *, report: Callable[[str], None]) -> dict[str, jax.Array]:
    """Every array of `parameter_shapes`: matrices in `dtype`, norms and biases in float32."""
    pieces = _find_pieces(path, config)
    shapes = parameter_shapes(config)
    has_offsets = config.has_offset_norms and path.is_dir()  # llama.cpp's converter puts whole weights in a GGUF file
    progress = Progress("loading weights", sum(map(math.prod, shapes.values())), report)
    arrays: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(_num_threads(), thread_name_prefix="levserve-weights") as pool:
        for name, shape in shapes.items():
            host = _aligned_array(shape, np.dtype(dtype if len(shape) > 1 else np.float32))
            for piece in pieces[name]:
                _fill(host[piece.target.index], piece.tensor, pool)
            if has_offsets and name.endswith("norm"):
                host += 1
            # Waiting keeps a slow transfer from holding several arrays on the host.
            arrays[name] = jax.device_put(host).block_until_ready()
            progress.advance(host.size)
    return arrays


def _find_pieces(path: Path, config: ModelConfig) -> dict[str, list[_Piece]]:
    """The tensors that fill each array, once the checkpoint is known to hold exactly what the model needs."""
    if path.is_dir():
        file_format, tensors = Format.HUGGING_FACE, dict(hf.read_tensors(path))
    else:
        file_format, tensors = Format.GGUF, dict(gguf.read_tensors(path, config.head_dim))
    targets = find_targets(config, file_format, tensors.keys())
    match_tensors(str(path), {name: tensor.shape for name, tensor in tensors.items()}, targets)
    pieces: dict[str, list[_Piece]] = {}
    for name, target in targets.items():
        pieces.setdefault(target.array, []).append(_Piece(tensors[name], target))
    return pieces


def _fill(rows: NDArray[np.generic], tensor: StoredTensor, pool: Executor) -> None:
    step = max(1, PIECE_SIZE // (rows.size // len(rows)))

    def copy(start: int) -> None:
        stop = min(start + step, len(rows))
        rows[start:stop] = tensor.read(start, stop)

    for _ in pool.map(copy, range(0, len(rows), step)):  # asking for the results raises what a thread raised
        pass


def _aligned_array(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start:start + num_bytes].view(dtype).reshape(shape)


def _num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))
