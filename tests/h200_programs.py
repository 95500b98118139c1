"""Makes a server's programs for H200s and the shapes of their arguments, and compiles them; see `h200.py`."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from levserve.device.programs import Programs
from levserve.device.rounds import Arrays, Skeleton, State
from levserve.device.runner import make_state
from levserve.device.sizing import plan_sizes
from levserve.model import cache
from levserve.model.backend import CompilerOptions
from levserve.model.config import ModelConfig
from levserve.model.decoder import Blueprint
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.placement import BY_HEADS, STACKED, WHOLE, make_mesh
from levserve.model.select import choose_backend
from levserve.model.sharding import AXIS, find_cut, local_config
from levserve.observe.metrics import Metrics
from levserve.settings.parse import parse_settings
from tests.h200 import SPECIFICATION, Thunk, read_thunks


class Given(NamedTuple):
    """Programs, with the shapes of the arrays that they are compiled for."""

    programs: Programs
    leaves: Arrays
    state: State


class Compiled(NamedTuple):
    thunks: list[Thunk]
    text: str
    alias_bytes: int
    temp_bytes: int


@functools.cache
def cards(count: int = 1) -> list[jax.Device]:
    """`count` H200s of one host, which programs can be compiled for but not run on."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=SPECIFICATION.read_text(), topology=f"1x1x{count}"
    )
    return list(topology.devices)


def placed(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """An array on a single card."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=SingleDeviceSharding(cards()[0]))


def on_the_card() -> AbstractContextManager[None]:
    """Names the card to compile for; otherwise Pallas looks for one on this machine."""
    card = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=card))


def matrices_in_bfloat16(shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters of a model as a server holds them: vectors are in float32."""
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16 if len(shape) > 1 else jnp.float32)
        for name, shape in shapes.items()
    }


def programs_of(config: ModelConfig, *, rows: int, num_pages: int, count: int = 1) -> Given:
    """The programs of a server whose model is on one card, or shared by several."""
    mesh = make_mesh(cards(count))
    local = local_config(config, count)
    backend, _ = choose_backend("gpu", local)
    storage = backend.kv_storage(jnp.dtype(jnp.bfloat16))

    def shared(array: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        if mesh is None:
            return placed(array)
        whole = list(array.shape)
        if AXIS in spec:
            whole[spec.index(AXIS)] *= count
        return jax.ShapeDtypeStruct(tuple(whole), array.dtype, sharding=NamedSharding(mesh, spec))

    settings = parse_settings(["--kv-pages", str(num_pages)], {})
    sizes = plan_sizes(
        settings,
        backend.traits,
        free_bytes=100 << 30,
        rows=rows,
        max_position=config.max_position,
        page_bytes=cache.page_bytes(local, settings.page_size, storage),
        weight_bytes=0,
    )
    arrays = {
        name: shared(array, WHOLE if find_cut(name, config) is None else STACKED)
        for name, array in matrices_in_bfloat16(parameter_shapes(local)).items()
    }
    state = jax.eval_shape(lambda: make_state(local, sizes, storage))
    state = jax.tree.map(lambda array: shared(array, BY_HEADS if array.ndim == 5 else WHOLE), state)
    leaves = tuple(arrays.values())
    skeleton = Skeleton(Blueprint(local, backend), tuple(arrays), sizes.table_width)
    return Given(Programs(leaves, state, skeleton, sizes, Metrics()), leaves, state)


def compile_on_the_card(
    lower: Callable[[], jax.stages.Lowered], options: CompilerOptions | None = None
) -> Compiled:
    """Compiles for one card, and reads the thunk sequence that XLA dumped."""
    with tempfile.TemporaryDirectory() as folder, on_the_card():
        dump: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lower().compile({**(options or {}), **dump})
        thunks = read_thunks(Path(folder))
    memory = compiled.memory_analysis()
    return Compiled(thunks, compiled.as_text(), memory.alias_size_in_bytes, memory.temp_size_in_bytes)
