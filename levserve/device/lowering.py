"""Lowers programs for one device, or for several that each run them on their own parts of the arrays.

GSPMD, which would partition a program by itself, gathers the whole KV pool of every layer and cannot
partition kernels.
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
        """An array that the host passes to a program, replicated on every device."""
        sharding = None if self.mesh is None else NamedSharding(self.mesh, WHOLE)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def lower(
        self, function: Callable[..., Any], *given: Any, returns: Any, donate: int | tuple[int, ...] = ()
    ) -> jax.stages.Lowered:
        """`given` and `returns` are trees of abstract arrays with the shardings of the arguments and results.

        In `returns`, WHOLE stands for any arrays that are the same on all devices.
        """
        if self.mesh is not None:
            function = jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=specs_of(given),
                out_specs=specs_of(returns),
                # Loops begin with zeros, which are equal on all devices, and carry on with values that are
                # not; jax would require every such zero to be marked.
                check_vma=False,
            )
        return jax.jit(function, donate_argnums=donate).lower(*given)


def specs_of(arrays: Any) -> Any:
    """How each array of a tree is sharded over its mesh."""

    def spec(array: Any) -> PartitionSpec:
        if isinstance(array, PartitionSpec):
            return array
        assert isinstance(array.sharding, NamedSharding)
        return array.sharding.spec

    return jax.tree.map(spec, arrays)
