"""Compiles kernels for an NVIDIA L4, whose programs have 99 KiB of shared memory, on a machine that has none.

See `h200.py`, whose plugin this takes. Such a compilation fails if a kernel needs more memory than there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

SPECIFICATION = Path(__file__).with_suffix(".txtpb")


@functools.cache
def card() -> jax.Device:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=SPECIFICATION.read_text(), topology="1x1x1"
    )
    return topology.devices[0]


def placed(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array on the card."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(card()))


def named(kind: str) -> AbstractContextManager[None]:
    """Traces for a card of which only the name is known."""
    device = jax.sharding.AbstractDevice(kind, num_cores=58, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def compile_on_the_card(function: Callable[..., Any], *arrays: Any) -> str:
    """The text of the compiled program."""
    with named("NVIDIA L4"):
        return str(jax.jit(function).lower(*arrays).compile().as_text())
