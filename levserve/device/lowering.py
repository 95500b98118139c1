"""Lowers programs: for one device, or for several that each run it on their own parts of the arrays.

GSPMD, which would cut a program by itself, gathers the whole KV pool of every layer and cannot cut kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from levserve.model.placement import WHOLE


class Lowering:
    """Lowers programs over a mesh, or for one device if there is none."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh

    def argument(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """An array that the host passes to a program, all of it to every device."""
        sharding = None if self.mesh is None else NamedSharding(self.mesh, WHOLE)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def lower(
        self, function: Callable[..., Any], *given: Any, returns: Any, donate: int | tuple[int, ...] = ()
    ) -> jax.stages.Lowered:
        """`given` and `returns` are trees of arrays without content; those returned lie as those given.

        In `returns`, WHOLE stands for any arrays that are the same on all devices.
        """
        if self.mesh is not None:
            function = jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=specs_of(given),
                out_specs=specs_of(returns),
                # Loops begin with zeros, which are the same everywhere, and go on with what is not; jax would
                # have every such zero marked.
                check_vma=False,
            )
        return jax.jit(function, donate_argnums=donate).lower(*given)


def specs_of(arrays: Any) -> Any:
    """How each array of a tree lies on its mesh."""

    def spec(array: Any) -> PartitionSpec:
        if isinstance(array, PartitionSpec):
            return array
        assert isinstance(array.sharding, NamedSharding)
        return array.sharding.spec

    return jax.tree.map(spec, arrays)
