"""Reads a checkpoint of any format: its configuration, and its weights as the model's arrays.

Arrays are filled one at a time. A few threads decode blocks of rows and write them in the serving type
straight to their place, so the host holds one copy of the weights and a few megabytes more. Matrices that
levserve quantizes are decoded and rounded in one pass over such blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.gguf.parts import part_names
from levserve.model.aligned import aligned_array
from levserve.model.backend import Backend
from levserve.model.balance import Matrices, balance_arrays, can_balance, leave_unbalanced
from levserve.model.config import ModelConfig, YarnScaling
from levserve.model.int4_blocks import FourBits
from levserve.model.int8_blocks import TooLarge
from levserve.model.packed import Kept, Scheme
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.placement import place, shards_of
from levserve.model.quantize import Quantization, quantize_arrays
from levserve.model.sharding import UNSHARED, Shards, find_cut
from levserve.model.xla import XLA_ON_CPU
from levserve.weights import gguf_tensors, hf_tensors
from levserve.weights.adapter_tensors import merge_adapter
from levserve.weights.cutter import Cutter
from levserve.weights.fill import Source, StoredRows, fill, num_threads
from levserve.weights.gguf_config import read_gguf_config
from levserve.weights.gguf_latent import arrange_latent
from levserve.weights.hf_config import read_hf_config, read_method
from levserve.weights.levanter_config import read_levanter_config
from levserve.weights.levanter_folder import CONFIG_FILE, find_config, is_levanter_checkpoint
from levserve.weights.mapping import PageRelease
from levserve.weights.packed_arrays import find_four_bits, find_schemes, read_four_bits, read_packed
from levserve.weights.prepared import Arrays, WeightCache
from levserve.weights.progress import Progress, Report
from levserve.weights.quantized import hf_folder
from levserve.weights.quantized.rounded import round_sources
from levserve.weights.stored_tensor import StoredTensor
from levserve.weights.tensor_names import Format, find_targets, match_tensors
from levserve.weights.tied_head import HEAD, compare_head

if TYPE_CHECKING:
    from levserve.weights.levanter_checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a checkpoint, or of a program that has them in memory."""

    source: str
    """The checkpoint's path or another description, for errors."""
    by_name: Mapping[str, StoredTensor]
    file_format: Format = Format.HUGGING_FACE
    files: Sequence[Path] = ()
    """The files that are mapped into memory."""
    is_stacked: bool = False
    """Whether tensors of one kind are read fastest one after another."""

    @property
    def has_offset_norms(self) -> bool:
        """Whether a family that adds 1 to its norms stores them without it; llama.cpp's converter adds it."""
        return self.file_format is not Format.GGUF


def read_config(path: Path, config_file: Path | None = None) -> ModelConfig:
    """The model's shape, from config.json, a GGUF file's metadata, or the config file of a Levanter run."""
    config = _read_config(path, config_file)
    if config.num_heads % config.num_kv_heads:
        heads = (
            f"{config.num_heads} query heads cannot share {config.num_kv_heads} key and value heads evenly"
        )
        raise StartupError(f"{path}: {heads}")
    rotary_size = config.rotary_size or config.head_dim
    if config.rope_theta is not None and rotary_size % 2:
        raise StartupError(f"{path}: the head size {rotary_size} is odd, but rotary positions need pairs")
    if isinstance(config.rope_scaling, YarnScaling) and (config.rope_theta or 0) <= 1:
        raise StartupError(f"{path}: YaRN needs a rope_theta of more than 1")
    if config.experts_per_token > config.num_experts:
        experts = f"{config.experts_per_token} experts per token, but the model has only {config.num_experts}"
        raise StartupError(f"{path}: {experts}")
    return config


def is_quantized_checkpoint(path: Path) -> bool:
    """Whether the matrices of the checkpoint have eight bits or fewer per weight."""
    if not path.is_dir():
        return gguf_tensors.is_quantized(path)
    return not is_levanter_checkpoint(path) and read_method(path / "config.json") is not None


def read_schemes(path: Path, config: ModelConfig, num_shards: int) -> dict[str, Scheme]:
    """The scheme of each array that can stay as the checkpoint stores it. Reads no weights."""
    tensors = open_tensors(path, config, jnp.dtype(jnp.float32))
    return find_schemes(_find_sources(tensors, config), config, num_shards)


def find_four_bit_matrices(path: Path, config: ModelConfig) -> dict[str, Scheme]:
    """The scheme of each matrix that can stay in four bits on a CPU. Reads no weights."""
    tensors = open_tensors(path, config, jnp.dtype(jnp.float32))
    return find_four_bits(_find_sources(tensors, config), config)


def load_arrays(
    path: Path,
    config: ModelConfig,
    dtype: jnp.dtype,
    *,
    report: Report,
    quantization: Quantization | Kept | None = None,
    backend: Backend = XLA_ON_CPU,
    mesh: Mesh | None = None,
    prepared: WeightCache | None = None,
    adapter: Path | None = None,
) -> dict[str, jax.Array]:
    """Every array of `parameter_shapes`, on the device, or cut over the devices of a mesh.

    Matrices are in `dtype`, quantized or as they are stored, those of experts in the backend's
    `expert_storage` of `dtype`; norms and biases are in float32. `prepared` weights are not converted again.
    """

    convert = partial(
        read_arrays,
        path,
        config,
        dtype,
        report=report,
        quantization=quantization,
        backend=backend,
        shards=shards_of(mesh),
        adapter=adapter,
    )
    arrays = convert() if prepared is None else prepared.read(convert, report)
    placed = {}
    for name, host in arrays:
        array = place(host, mesh, is_cut=find_cut(name, config) is not None)
        # Waiting for each transfer keeps the host from holding several arrays.
        placed[name] = array.block_until_ready()
    return placed


def read_arrays(
    path: Path,
    config: ModelConfig,
    dtype: jnp.dtype,
    *,
    report: Report,
    quantization: Quantization | Kept | None = None,
    backend: Backend = XLA_ON_CPU,
    shards: Shards = UNSHARED,
    adapter: Path | None = None,
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yields the arrays of `load_arrays` in the host's memory. Uses no device, so any thread may call it."""
    read_dtype = jnp.dtype(jnp.float32) if isinstance(quantization, Quantization) else dtype
    tensors = open_tensors(path, config, read_dtype, adapter)
    return convert_tensors(
        tensors,
        config,
        dtype,
        report=report,
        quantization=quantization,
        backend=backend,
        shards=shards,
    )


def convert_tensors(
    tensors: Tensors,
    config: ModelConfig,
    dtype: jnp.dtype,
    *,
    report: Report,
    quantization: Quantization | Kept | None = None,
    backend: Backend = XLA_ON_CPU,
    shards: Shards = UNSHARED,
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """The model's arrays, each filled from these tensors when it is asked for; `config` is the whole model's.

    Arrays that are cut between devices come with the shares of `shards` stacked. If they are to be integers,
    they are read in float32, one at a time, and cut first, because quantization mixes a matrix's columns.
    """
    if not isinstance(quantization, Quantization):
        return _read_plain(
            tensors, config, dtype, backend.expert_storage(dtype), shards, report=report, kept=quantization
        )
    if config.num_experts:
        raise StartupError(
            f"{tensors.source}: --quantize {quantization.kept} does not support a mixture of experts, and "
            "--quantize fp8, for GPUs, does"
        )
    float32 = jnp.dtype(jnp.float32)
    four_bits = dict(quantization.four_bits)
    kept = _read_four_bits(tensors, config, four_bits, report)
    plain: Matrices = _read_plain(
        tensors, config, float32, float32, shards, report=report, left_out=four_bits
    )
    if shards.count == 1 and not tensors.is_stacked:
        plain = _open_rows(tensors, config, report, four_bits)
    if quantization.is_balanced and can_balance(config) and shards.count == 1:
        if tensors.is_stacked:  # the layers do not come one after another
            plain = leave_unbalanced(config, plain)
        else:
            plain, config = balance_arrays(config, plain), replace(config, tied_head=False)
    arrays = chain(kept, plain)
    shares = len(shards.here)
    quantized = quantize_arrays(config, arrays, dtype, quantization, num_threads(), num_shares=shares)
    return _explain_too_large(quantized, tensors.source)


def _explain_too_large(arrays: Arrays, source: str) -> Arrays:
    try:
        yield from arrays
    except TooLarge as error:
        raise StartupError(f"{source}: {error}: use --quantize int8") from None


def load_order(names: Iterable[str]) -> list[str]:
    """The names sorted by kind, as Levanter stacks them: the qkv of all layers, the out of all layers, ..."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "", name), []).append(name)
    return [name for kind in kinds.values() for name in kind]


def _read_plain(
    tensors: Tensors,
    config: ModelConfig,
    dtype: jnp.dtype,
    expert_storage: jnp.dtype,
    shards: Shards,
    *,
    report: Report,
    kept: Kept | None = None,
    left_out: Collection[str] = (),
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    sources = _find_sources(tensors, config)
    schemes = {} if kept is None else kept.by_name()
    is_rounded = kept is not None and kept.is_rounded
    if schemes and not is_rounded:
        _check_schemes(tensors, find_schemes(sources, config, shards.count), schemes)
    cutter = Cutter(config, shards)
    shapes = {name: shape for name, shape in cutter.host_shapes.items() if name not in left_out}
    has_offsets = config.has_offset_norms and tensors.has_offset_norms
    progress = Progress("loading weights", sum(map(math.prod, shapes.values())), report)
    mapped = PageRelease(tensors.files)
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="levserve-weights") as pool:
        for name in load_order(shapes) if tensors.is_stacked else shapes:
            if name in schemes:
                progress.advance(math.prod(shapes[name]))
                found = round_sources(sources[name]) if is_rounded else sources[name]
                for part, array in read_packed(name, schemes[name], found, cutter, pool, tensors.source):
                    mapped.advance(array.nbytes)
                    yield part, array
                continue
            is_matrix = len(shapes[name]) > 1 and not name.endswith("_bias")
            host = aligned_array(shapes[name], np.dtype(dtype if is_matrix else np.float32))
            if cutter.has_gaps(name):
                host[...] = 0
            for source in sources[name]:
                fill(cutter.copies(name, host, source), source, pool, tensors.source)
            if has_offsets and name.endswith("norm"):
                np.add(host, 1, out=host)
            if host.ndim > 2:
                host = host.view(expert_storage)
            progress.advance(host.size)
            mapped.advance(host.nbytes)
            yield name, host


def _open_rows(tensors: Tensors, config: ModelConfig, report: Report, left_out: Collection[str]) -> Matrices:
    """The arrays for one device in float32; a matrix comes unread, and its rows are read when asked for."""
    sources = _find_sources(tensors, config)
    shapes = {name: shape for name, shape in parameter_shapes(config).items() if name not in left_out}
    has_offsets = config.has_offset_norms and tensors.has_offset_norms
    progress = Progress("loading weights", sum(map(math.prod, shapes.values())), report)
    mapped = PageRelease(tensors.files)
    for name, shape in shapes.items():
        rows = StoredRows(shape, sources[name], tensors.source)
        if len(shape) > 1:
            yield name, rows
        else:
            array = rows.read(0, shape[0])
            yield name, array + 1 if has_offsets and name.endswith("norm") else array
        progress.advance(math.prod(shape))
        mapped.advance(math.prod(shape) * 4)


def _read_four_bits(
    tensors: Tensors, config: ModelConfig, schemes: Mapping[str, Scheme], report: Report
) -> Iterator[tuple[str, FourBits]]:
    """The matrices that stay in four bits. A tied head is the embedding's matrix, which is read again."""
    if not schemes:
        return
    sources, cutter = _find_sources(tensors, config), Cutter(config, UNSHARED)
    _check_schemes(tensors, find_four_bits(sources, config), schemes)
    shapes, mapped = cutter.host_shapes, PageRelease(tensors.files)
    stored = {name: "embed" if name == "head" and config.tied_head else name for name in schemes}
    progress = Progress(
        "loading weights of four bits", sum(math.prod(shapes[name]) for name in stored.values()), report
    )
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="levserve-weights") as pool:
        for name, scheme in schemes.items():
            array = stored[name]
            yield name, read_four_bits(array, scheme, sources[array], cutter, pool, tensors.source)
            progress.advance(math.prod(shapes[array]))
            mapped.advance(math.prod(shapes[array]) // 2)


def _check_schemes(tensors: Tensors, found: Mapping[str, Scheme], wanted: Mapping[str, Scheme]) -> None:
    if any(found.get(name) != scheme.as_stored() for name, scheme in wanted.items()):
        raise StartupError(
            f"{tensors.source}: its matrices are quantized differently from those being served, which keep "
            "their stored form"
        )


def _read_config(path: Path, config_file: Path | None) -> ModelConfig:
    if not path.is_dir():
        return read_gguf_config(path)
    if not is_levanter_checkpoint(path):
        return read_hf_config(path / "config.json")
    config_file = config_file or find_config(path)
    if config_file is None:
        where = f"no {CONFIG_FILE} in it or the two folders above"
        raise StartupError(f"{path}: {where}; give the run's config with --model-config")
    return read_levanter_config(config_file, _open_checkpoint(path).shapes())


def _open_checkpoint(path: Path) -> Checkpoint:
    # Imported here because tensorstore takes 14 MB and 20 ms, which other formats need not pay.
    from levserve.weights.levanter_checkpoint import Checkpoint

    return Checkpoint(path)


def open_tensors(path: Path, config: ModelConfig, dtype: jnp.dtype, adapter: Path | None = None) -> Tensors:
    """The tensors of a checkpoint; a LoRA adapter can be merged into those of a Hugging Face folder."""
    if adapter is not None:
        return _open_adapted(path, config, adapter)
    if is_levanter_checkpoint(path):
        stored = dict(_open_checkpoint(path).read_tensors(np.dtype(dtype)))
        return Tensors(str(path), stored, files=[path], is_stacked=True)
    if path.is_dir():
        method = read_method(path / "config.json")
        if method is None:
            found = hf_tensors.read_tensors(path, config)
        else:
            found = hf_folder.read_tensors(path, config, method)
        return Tensors(str(path), dict(found), files=hf_tensors.find_files(path))
    found = arrange_latent(gguf_tensors.read_tensors(path, config.head_dim), config)
    files = [path.with_name(name) for name in part_names(path.name)]
    return Tensors(str(path), dict(found), Format.GGUF, files)


def _open_adapted(path: Path, config: ModelConfig, adapter: Path) -> Tensors:
    if not path.is_dir() or is_levanter_checkpoint(path):
        kind = "a Levanter checkpoint" if path.is_dir() else "a GGUF file"
        raise StartupError(
            f"adapter {adapter}: it can be added to a Hugging Face folder, and {path} is {kind}"
        )
    if read_method(path / "config.json") is not None:
        raise StartupError(
            f"adapter {adapter}: the weights of {path} are quantized already (quantization_config), and what "
            "is added to them would be rounded: name the model in full precision with --model, and --quantize"
        )
    files = hf_tensors.find_files(path)
    merged = merge_adapter(adapter, hf_tensors.read_files(files), config)
    source = f"{path} with adapter {adapter}"
    return Tensors(source, dict(hf_tensors.arrange_tensors(source, merged, config)), files=files)


def _find_sources(tensors: Tensors, config: ModelConfig) -> dict[str, list[Source]]:
    """The tensors that fill each array; refuses a checkpoint with tensors missing or left over."""
    targets = find_targets(config, tensors.file_format, tensors.by_name.keys())
    shapes = {name: tensor.shape for name, tensor in tensors.by_name.items()}
    match_tensors(tensors.source, shapes, targets)
    if config.tied_head:
        embed = next(name for name, target in targets.items() if target.array == "embed")
        compare_head(tensors.source, tensors.by_name.get(HEAD), tensors.by_name[embed])
    sources: dict[str, list[Source]] = {}
    for name, target in targets.items():
        sources.setdefault(target.array, []).append(Source(name, tensors.by_name[name], target))
    return sources
