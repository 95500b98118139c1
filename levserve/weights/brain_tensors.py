"""Reads the tensors of a brain's weight file: the shape of the model, and its arrays.

The tensors have the names that AI-OS gives them. Files of other models are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.model.aligned import aligned_array
from levserve.model.backend import Backend
from levserve.model.hrm_config import HrmConfig, hrm_parameter_shapes
from levserve.model.xla import XLA_ON_CPU
from levserve.weights.fill import Copy, Source, fill, num_threads
from levserve.weights.hf_tensors import HfTensor, check_dtype, read_file
from levserve.weights.progress import Progress, Report
from levserve.weights.stored_tensor import StoredTensor
from levserve.weights.tensor_names import Target

START = "inner."
EMBED = "inner.embed_tokens.embedding_weight"
LAYER = re.compile(r"inner\.([HL])_level\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.moe\.experts\.(\d+)\.w([12])\.weight")
OF_MODEL = {
    EMBED: "embed",
    "inner.lm_head.weight": "head",
    "inner.H_init": "h.init",
    "inner.L_init": "l.init",
}
OF_LAYER = {
    "self_attn.qkv_proj.weight": "qkv",
    "self_attn.o_proj.weight": "out",
    "mlp.gate_up_proj.weight": "gate_up",
    "mlp.down_proj.weight": "down",
    "mlp.moe.router.gate.weight": "router",
}
OF_EXPERT = {"1": "experts_gate_up", "2": "experts_down"}
UNUSED = ("inner.q_head.weight", "inner.q_head.bias")
"""The halting head, which serving does not need: every token is one run from the start states."""


@dataclass(frozen=True, slots=True)
class BrainShape:
    """The sizes that follow from the tensors' shapes, which cannot be wrong."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    h_layers: int
    l_layers: int
    num_experts: int


def read_brain_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor by its name without prefixes. Refuses files of other models, and says what they are."""
    tensors: dict[str, StoredTensor] = {}
    for full_name, mapped in read_file(path):
        name = full_name[full_name.find(START) :] if START in full_name else full_name
        _refuse_other_kinds(path, name)
        if name in tensors:
            raise StartupError(f"{path}: two tensors are called {name}")
        check_dtype(path, full_name, mapped)
        tensors[name] = HfTensor(mapped)
    if EMBED not in tensors:
        raise StartupError(
            f"{path} is not an ACT v1 brain of AI-OS: it has no tensor {EMBED}, but "
            f"{', '.join(sorted(tensors)[:4]) or 'none at all'}"
        )
    return tensors


def read_shape(path: Path, tensors: Mapping[str, StoredTensor]) -> BrainShape:
    """The model's sizes; refuses missing layers, and a mix of layers with and without experts."""
    vocab_size, hidden_size = _matrix_shape(path, tensors, EMBED)
    layers: dict[str, set[int]] = {"H": set(), "L": set()}
    experts: set[int] = set()
    is_dense = has_experts = False
    for name in tensors:
        found = LAYER.fullmatch(name)
        if found is None:
            continue
        level, number, rest = found.groups()
        layers[level].add(int(number))
        is_dense |= rest == "mlp.gate_up_proj.weight"
        has_experts |= rest.startswith("mlp.moe.")
        if expert := EXPERT.fullmatch(rest):
            experts.add(int(expert[1]))
    for level, numbers in layers.items():
        if not numbers or numbers != set(range(len(numbers))):
            raise StartupError(
                f"{path}: the {level} level has layers {sorted(numbers)}, which are not consecutive from 0"
            )
    if experts != set(range(len(experts))):
        raise StartupError(f"{path}: its experts are {sorted(experts)}, which are not consecutive from 0")
    if is_dense and has_experts:
        raise StartupError(f"{path}: some layers have experts and some have none, which is not supported")
    if has_experts:
        first, inner_axis = "inner.H_level.layers.0.mlp.moe.experts.0.w1.weight", 0
    else:
        first, inner_axis = "inner.H_level.layers.0.mlp.down_proj.weight", 1
    intermediate_size = _matrix_shape(path, tensors, first)[inner_axis]
    return BrainShape(
        vocab_size,
        hidden_size,
        intermediate_size,
        len(layers["H"]),
        len(layers["L"]),
        len(experts) if has_experts else 0,
    )


def read_brain_arrays(
    path: Path, config: HrmConfig, dtype: jnp.dtype, *, report: Report, backend: Backend = XLA_ON_CPU
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Every array of `hrm_parameter_shapes`, one after another in the host's memory.

    Matrices are in `dtype`, those of experts in the backend's storage of it, and start states in float32.
    """
    sources = find_brain_sources(path, config, read_brain_tensors(path))
    shapes = hrm_parameter_shapes(config)
    progress = Progress("loading weights", sum(map(math.prod, shapes.values())), report)
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="levserve-weights") as pool:
        for name, shape in shapes.items():
            host = aligned_array(shape, np.dtype(dtype if len(shape) > 1 else np.float32))
            for source in sources[name]:
                whole = Copy(range(source.tensor.shape[0]), (), host[source.target.index])
                fill([whole], source, pool, str(path))
            if host.ndim > 2:
                host = host.view(backend.expert_storage(dtype))
            progress.advance(host.size)
            yield name, host


def find_brain_sources(
    path: Path, config: HrmConfig, tensors: Mapping[str, StoredTensor]
) -> dict[str, list[Source]]:
    """The tensors that fill each array; refuses a file with missing, unknown or misshapen ones."""
    shapes = hrm_parameter_shapes(config)
    sources: dict[str, list[Source]] = {}
    for name, tensor in tensors.items():
        if name in UNUSED:
            continue
        array, expert = _array_of(name)
        if array not in shapes:
            raise StartupError(f"{path}: there is no place in the model for the tensor {name}")
        expected = shapes[array] if expert is None else shapes[array][1:]
        if tensor.shape != expected:
            raise StartupError(f"{path}: {name} is of shape {list(tensor.shape)}, not {list(expected)}")
        index = (slice(None) if expert is None else expert,)
        sources.setdefault(array, []).append(Source(name, tensor, Target(array, index, tensor.shape)))
    for array, shape in shapes.items():
        needed = shape[0] if len(shape) == 3 else 1
        if len(sources.get(array, [])) != needed:
            raise StartupError(f"{path}: tensors of {array} are missing")
    return sources


def _array_of(name: str) -> tuple[str, int | None]:
    """The levserve name of a tensor's array, and the number of the expert that it is a part of."""
    found = LAYER.fullmatch(name)
    if found is None:
        return OF_MODEL.get(name, ""), None
    level, number, rest = found.groups()
    at = f"{level.lower()}.layers.{number}."
    if expert := EXPERT.fullmatch(rest):
        return at + OF_EXPERT[expert[2]], int(expert[1])
    return at + OF_LAYER.get(rest, ""), None


def _refuse_other_kinds(path: Path, name: str) -> None:
    if "lora_" in name or ".base_layer." in name:
        raise StartupError(
            f"{path} is a PEFT run ({name}): its adapter is kept apart from the weights, and AI-OS itself "
            "would ignore it; merge the adapter into the weights first"
        )
    if name.startswith("inner.puzzle_emb"):
        raise StartupError(
            f"{path} is a puzzle checkpoint of sapientinc/HRM ({name}): it fills in grids of a fixed size "
            "and reads no text, so there is nothing to serve"
        )
    if name.startswith("inner.embed_pos"):
        raise StartupError(
            f"{path} has learned positions ({name}): such a brain works only on texts of exactly its "
            "training length, so it cannot generate; train one with rotary positions"
        )


def _matrix_shape(path: Path, tensors: Mapping[str, StoredTensor], name: str) -> tuple[int, ...]:
    if name not in tensors:
        raise StartupError(f"{path}: the tensor {name} is missing")
    shape = tensors[name].shape
    if len(shape) != 2:
        raise StartupError(f"{path}: {name} is of shape {list(shape)}, not a matrix")
    return shape
