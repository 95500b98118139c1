"""What the host takes to start a program on several devices, and how that grows with their number.

A call of a compiled program with the arrays of Llama-3.1-8B: so many, but small, on parts of this machine's CPU. It runs nothing to
speak of, so what is measured is the call alone: the upper end of what a GPU's would take, because the parts share the cores.

    python3 bench/spread.py --devices 1 2 4
"""

from __future__ import annotations

import argparse
import os
import time

NUM_LAYERS, ARRAYS_PER_LAYER, OTHER_ARRAYS = 32, 6, 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--calls", type=int, default=300)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(max(options.devices))
    num_leaves = NUM_LAYERS * ARRAYS_PER_LAYER + OTHER_ARRAYS
    print(f"{num_leaves} arrays of weights, {NUM_LAYERS} KV pools; best of {options.calls} calls")
    seconds = {count: measure(count, num_leaves, options.calls) for count in options.devices}
    first = options.devices[0]
    for count, taken in seconds.items():
        print(
            f"{count} devices  {taken * 1e3:6.2f} ms a call  {taken / seconds[first]:5.2f} x that of {first}"
        )


def measure(count: int, num_leaves: int, num_calls: int) -> float:
    """Seconds of the fastest call."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from levserve.device.spread import Spread
    from levserve.model.placement import BY_HEADS, STACKED, WHOLE, make_mesh

    mesh = make_mesh(jax.devices()[:count])

    def zeros(shape: tuple[int, ...], spec: jax.sharding.PartitionSpec) -> jax.Array:
        if mesh is None:
            return jnp.zeros(shape)
        placed: jax.Array = jax.device_put(jnp.zeros(shape), jax.sharding.NamedSharding(mesh, spec))
        return placed

    def run(
        leaves: tuple[jax.Array, ...], pools: tuple[jax.Array, ...], packed: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        # Every array is used, or else XLA would drop it.
        return pools, packed + jnp.stack([leaf[0, 0] for leaf in leaves]).sum().astype(jnp.int32)

    leaves = tuple(zeros((8 * count, 8), STACKED) for _ in range(num_leaves))
    pools = tuple(zeros((4, 2, count), BY_HEADS) for _ in range(NUM_LAYERS))
    packed = np.zeros((64, 64), np.int32)
    spread = Spread(mesh)
    avals = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), (leaves, pools)
    )
    argument = spread.argument(packed.shape, packed.dtype)
    program = spread.lower(run, *avals, argument, returns=(avals[1], WHOLE), donate=1).compile()
    taken = []
    for _ in range(num_calls):
        start = time.perf_counter()
        pools, output = program(leaves, pools, packed)
        taken.append(time.perf_counter() - start)
        output.block_until_ready()
    return min(taken)


if __name__ == "__main__":
    main()
