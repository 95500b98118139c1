"""Measures the host's time to start a program on several devices and read its result, by their number.

It calls a compiled program with as many arrays as Llama-3.1-8B has, but small ones, on virtual devices
of this machine's CPU. The program computes almost nothing, so what is measured is the runtime alone. A
GPU's runtime should take no longer, because the virtual devices share the cores.

    python3 bench/spread.py --devices 1 2 4
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    import jax

NUM_LAYERS, ARRAYS_PER_LAYER, OTHER_ARRAYS = 32, 6, 3


class Times(NamedTuple):
    """Seconds, each of the fastest of many calls or reads."""

    call: float
    """With the packed array of a round, which the host passes."""
    call_without: float
    """The same where that array is on the devices already."""
    call_of_few: float
    """With one layer's arrays in place of all."""
    read: float
    """Of a result that is ready."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--calls", type=int, default=300)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(max(options.devices))
    print(f"{NUM_LAYERS} layers of {ARRAYS_PER_LAYER} arrays and a KV pool; ms, best of {options.calls}")
    print(f"{'devices':>8}{'call':>8}{'packed array':>14}{'other arrays':>14}{'rest':>8}{'read':>8}")
    for count in options.devices:
        times = measure(count, options.calls)
        parts = (
            times.call,
            times.call - times.call_without,
            times.call_without - times.call_of_few,
            times.call_of_few,
            times.read,
        )
        widths = (8, 14, 14, 8, 8)
        print(f"{count:8}" + "".join(f"{part * 1e3:{width}.3f}" for part, width in zip(parts, widths)))


def measure(count: int, num_calls: int) -> Times:
    """Measures the cases by turns, so that changes on the machine affect all alike."""
    import jax
    import numpy as np

    from levserve.model.placement import make_mesh, place

    mesh = make_mesh(jax.devices()[:count])
    packed = np.zeros((64, 64), np.int32)
    placed = place(packed, mesh, is_cut=False)
    of_all, of_one = make_call(mesh, NUM_LAYERS), make_call(mesh, 1)
    best = [float("inf")] * len(Times._fields)
    for _ in range(num_calls):
        for index, (call, given) in enumerate(((of_all, packed), (of_all, placed), (of_one, placed))):
            start = time.perf_counter()
            output = call(given)
            best[index] = min(best[index], time.perf_counter() - start)
            output.copy_to_host_async()
            output.block_until_ready()
            start = time.perf_counter()
            np.asarray(output)
            best[-1] = min(best[-1], time.perf_counter() - start)
    return Times(*best)


def make_call(mesh: jax.sharding.Mesh | None, num_layers: int) -> Callable[[Any], jax.Array]:
    """Returns a function that calls a program. The program uses every array, because XLA would drop the
    others, and donates its pools."""
    import jax
    import jax.numpy as jnp

    from levserve.device.lowering import Lowering
    from levserve.model.placement import BY_HEADS, STACKED, WHOLE

    count = 1 if mesh is None else mesh.size

    def zeros(shape: tuple[int, ...], spec: jax.sharding.PartitionSpec) -> jax.Array:
        if mesh is None:
            return jnp.zeros(shape)
        placed: jax.Array = jax.device_put(jnp.zeros(shape), jax.sharding.NamedSharding(mesh, spec))
        return placed

    def run(
        leaves: tuple[jax.Array, ...], pools: tuple[jax.Array, ...], packed: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        return pools, packed + jnp.stack([leaf[0, 0] for leaf in leaves]).sum().astype(jnp.int32)

    num_leaves = num_layers * ARRAYS_PER_LAYER + OTHER_ARRAYS
    leaves = tuple(zeros((8 * count, 8), STACKED) for _ in range(num_leaves))
    pools = tuple(zeros((4, 2, count), BY_HEADS) for _ in range(num_layers))
    spread = Lowering(mesh)
    avals = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), (leaves, pools)
    )
    argument = spread.argument((64, 64), jnp.int32)
    program = spread.lower(run, *avals, argument, returns=(avals[1], WHOLE), donate=1).compile()

    def call(packed: Any) -> jax.Array:
        nonlocal pools
        pools, output = program(leaves, pools, packed)
        result: jax.Array = output
        return result

    return call


if __name__ == "__main__":
    main()
