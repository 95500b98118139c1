"""Fills a model's arrays from a checkpoint, and reads what the checkpoint says about itself.

Called once at start, on the device thread. Arrays are filled one at a time: pieces of rows are decoded by a few threads and
written in the serving type straight to their place, so the host holds one copy of the weights and a few megabytes on the way.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.model.aligned import aligned_array
from levserve.model.backend import Backend
from levserve.model.config import ModelConfig, parameter_shapes
from levserve.model.quantize import Quantization, quantize_arrays
from levserve.model.xla import XLA_ON_CPU
from levserve.weights import gguf, hf
from levserve.weights.gguf_config import read_gguf_config
from levserve.weights.hf_config import read_hf_config
from levserve.weights.levanter_config import read_levanter_config
from levserve.weights.levanter_folder import CONFIG_FILE, find_config, is_checkpoint
from levserve.weights.mapping import release_pages
from levserve.weights.names import Format, Target, find_targets, match_tensors
from levserve.weights.progress import Progress
from levserve.weights.stored import StoredTensor

if TYPE_CHECKING:
    from levserve.weights.levanter import Checkpoint

PIECE_SIZE = 1 << 18  # numbers decoded at a time: 1 MB of float32 stays in the cache
MAX_THREADS = 8
MAPPED_BYTES = 128 << 20  # of weights that are read before the pages of their files are given up
BFLOAT16_EXPONENT = 0x7F80  # all ones in what is not finite


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stored tensor and what it fills."""

    name: str
    tensor: StoredTensor
    target: Target


def read_config(path: Path, config_file: Path | None = None) -> ModelConfig:
    """The model's shape, from a folder's config.json, a GGUF file's metadata, or the config file of a Levanter run."""
    config = _read_config(path, config_file)
    if config.num_heads % config.num_kv_heads:
        raise StartupError(
            f"{path}: {config.num_heads} query heads cannot share {config.num_kv_heads} key and value heads evenly"
        )
    if config.rope_theta is not None and (config.rotary_size or config.head_dim) % 2:
        raise StartupError(
            f"{path}: a head size of {config.rotary_size or config.head_dim} is odd, and rotary positions need pairs"
        )
    if config.experts_per_token > config.num_experts:
        raise StartupError(
            f"{path}: {config.experts_per_token} experts a token are more than the {config.num_experts} there are"
        )
    return config


def is_quantized_file(path: Path) -> bool:
    return not path.is_dir() and gguf.is_quantized(path)


def load_arrays(
    path: Path,
    config: ModelConfig,
    dtype: jnp.dtype,
    *,
    report: Callable[[str], None],
    quantization: Quantization | None = None,
    backend: Backend = XLA_ON_CPU,
) -> dict[str, jax.Array]:
    """Every array of `parameter_shapes`, on the device: matrices in `dtype` or in eight bits, norms and biases in float32.

    The matrices of experts are in the backend's `expert_storage` of `dtype`.
    """
    # Waiting keeps a slow transfer from holding several arrays on the host.
    arrays = read_arrays(path, config, dtype, report=report, quantization=quantization, backend=backend)
    return {name: jax.device_put(host).block_until_ready() for name, host in arrays}


def read_arrays(
    path: Path,
    config: ModelConfig,
    dtype: jnp.dtype,
    *,
    report: Callable[[str], None],
    quantization: Quantization | None = None,
    backend: Backend = XLA_ON_CPU,
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """The same arrays one after another in the host's memory; touches no device, so any thread may call it.

    Matrices that are quantized are read in float32, one at a time.
    """
    if quantization is None:
        return _read_plain(path, config, dtype, backend.expert_storage(dtype), report=report)
    if config.num_experts:
        raise StartupError(f"{path}: --quantize does not take a mixture of experts")
    float32 = jnp.dtype(jnp.float32)
    plain = _read_plain(path, config, float32, float32, report=report)
    return quantize_arrays(config, plain, dtype, quantization, _num_threads())


def load_order(names: Iterable[str]) -> list[str]:
    """Array names kind by kind (every layer's qkv, then every layer's out ...), as Levanter stacks them, and not layer by layer."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "", name), []).append(name)
    return [name for kind in kinds.values() for name in kind]


def _read_plain(
    path: Path,
    config: ModelConfig,
    dtype: jnp.dtype,
    expert_storage: jnp.dtype,
    *,
    report: Callable[[str], None],
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    pieces = _find_pieces(path, config, dtype)
    shapes = parameter_shapes(config)
    has_offsets = (
        config.has_offset_norms and path.is_dir()
    )  # llama.cpp's converter puts whole weights in a GGUF file
    progress = Progress("loading weights", sum(map(math.prod, shapes.values())), report)
    files = hf.find_files(path) if path.is_dir() and not is_checkpoint(path) else [path]
    mapped_bytes = 0
    with ThreadPoolExecutor(_num_threads(), thread_name_prefix="levserve-weights") as pool:
        for name in load_order(shapes) if is_checkpoint(path) else shapes:
            host = aligned_array(shapes[name], np.dtype(dtype if len(shapes[name]) > 1 else np.float32))
            for piece in pieces[name]:
                _fill(host[piece.target.index], piece, pool, path)
            if has_offsets and name.endswith("norm"):
                np.add(host, 1, out=host)
            if host.ndim > 2:
                host = host.view(expert_storage)
            progress.advance(host.size)
            mapped_bytes += host.nbytes
            if mapped_bytes > MAPPED_BYTES:
                release_pages(files)
                mapped_bytes = 0
            yield name, host


def _read_config(path: Path, config_file: Path | None) -> ModelConfig:
    if not path.is_dir():
        return read_gguf_config(path)
    if not is_checkpoint(path):
        return read_hf_config(path / "config.json")
    config_file = config_file or find_config(path)
    if config_file is None:
        raise StartupError(
            f"{path}: no {CONFIG_FILE} in it or the two folders above; name the run's with --model-config"
        )
    return read_levanter_config(config_file, _open_checkpoint(path).shapes())


def _open_checkpoint(path: Path) -> Checkpoint:
    from levserve.weights.levanter import (
        Checkpoint,  # brings tensorstore: 14 MB and 20 ms that other formats need not pay
    )

    return Checkpoint(path)


def _find_pieces(path: Path, config: ModelConfig, dtype: jnp.dtype) -> dict[str, list[_Piece]]:
    """The tensors that fill each array, once the checkpoint is known to hold exactly what the model needs."""
    tensors: dict[str, StoredTensor]
    if is_checkpoint(path):
        file_format, tensors = Format.HUGGING_FACE, dict(_open_checkpoint(path).read_tensors(np.dtype(dtype)))
    elif path.is_dir():
        file_format, tensors = Format.HUGGING_FACE, dict(hf.read_tensors(path))
    else:
        file_format, tensors = Format.GGUF, dict(gguf.read_tensors(path, config.head_dim))
    targets = find_targets(config, file_format, tensors.keys())
    match_tensors(str(path), {name: tensor.shape for name, tensor in tensors.items()}, targets)
    pieces: dict[str, list[_Piece]] = {}
    for name, target in targets.items():
        pieces.setdefault(target.array, []).append(_Piece(name, tensors[name], target))
    return pieces


def _fill(rows: NDArray[np.generic], piece: _Piece, pool: Executor, path: Path) -> None:
    step = max(1, PIECE_SIZE // (rows.size // len(rows)))

    def copy(start: int) -> None:
        stop = min(start + step, len(rows))
        part = piece.tensor.read(start, stop)
        if not _is_finite(part):
            raise StartupError(
                f"{path}: {piece.name} is corrupt: it holds numbers that are not finite (rows {start} to {stop})"
            )
        rows[start:stop] = part

    for _ in pool.map(copy, range(0, len(rows), step)):  # asking for the results raises what a thread raised
        pass


def _is_finite(part: NDArray[np.generic]) -> bool:
    if (
        part.dtype == ml_dtypes.bfloat16
    ):  # by its bits: numpy asks one number at a time, 3.6 ns each against 0.4
        return int((part.view(np.uint16) & BFLOAT16_EXPONENT).max()) < BFLOAT16_EXPONENT
    return bool(np.isfinite(part).all())


def _num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))
