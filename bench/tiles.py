"""Measures products on a CPU with its matrix units (AMX) and without them, matrix by matrix.

    python bench/tiles.py --shape smollm2-135m --rows 1 8 32 128
    taskset -c 0,1 python bench/tiles.py --shape llama-1b --rows 8 128

Each program multiplies the same rows with many copies of an int8 matrix, so that few of them are still in the
CPU's caches, as in a model. The two ways take turns, and the best turn of each counts. Their results must be
equal. The percentage is of the matrix units' peak speed, which is measured first.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from decode import SHAPES

from levserve.jit.program import Code, Program
from levserve.jit.target import AMX, Target, detect_target
from levserve.jit.tiles import TILE_ROW_BYTES, TILE_ROWS, Tiles, TileShape
from levserve.jit.xla_call import num_threads
from levserve.model.cpu import linear
from levserve.model.parameter_shapes import parameter_shapes

MATRICES = ("qkv", "out", "gate_up", "down")
BYTES_READ, MAX_COPIES = 256 << 20, 64
PEAK_LOOPS = 200_000

Multiply = Callable[[Sequence[jax.Array], jax.Array, jax.Array], list[jax.Array]]


def main() -> None:
    options = _parser().parse_args()
    target = detect_target()
    if not target.has_amx_int8:
        sys.exit("this CPU has no matrix units for int8, or Linux does not permit them")
    peak = measure_peak(target) * num_threads()
    print(
        f"{options.shape} on {target.cpu}, {num_threads()} threads, at most {peak / 1e9:.0f} Gop/s",
        flush=True,
    )
    ways = target.without(*AMX), target
    names = parameter_shapes(SHAPES[options.shape])
    sizes = {
        name: next(size for each, size in names.items() if each.endswith(name)) for name in options.matrices
    }
    for name, shape in sizes.items():
        weights, scale = random_copies(shape), jnp.ones(shape[0], jnp.float32)
        for rows in options.rows:
            x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, shape[1])), jnp.float32)
            calls = [jax.jit(multiplier(way)).lower(weights, scale, x).compile() for way in ways]
            without, by_tiles = take_turns(calls, weights, scale, x, options.turns)
            operations = 2 * rows * shape[0] * shape[1] * len(weights)
            print(
                f"{name:7} {shape[0]:5d} x {shape[1]:5d}  rows {rows:4d}  "
                f"without {without / len(weights) * 1e6:8.1f} us  with {by_tiles / len(weights) * 1e6:8.1f} us  "
                f"x {without / by_tiles:5.2f}  {operations / by_tiles / 1e9:7.0f} Gop/s, {operations / by_tiles / peak:4.0%}  "
                f"{sum(each.nbytes for each in weights) / by_tiles / 1e9:6.1f} GB/s",
                flush=True,
            )  # fmt: skip


def random_copies(shape: tuple[int, ...]) -> list[jax.Array]:
    """Copies of a random packed matrix, each with its rows in another order."""
    size = shape[0] * shape[1]
    numbers = np.frombuffer(np.random.default_rng(0).bytes(size), np.uint8).reshape(shape)
    copies = min(max(2, BYTES_READ // size), MAX_COPIES)
    return [jnp.array(np.roll(numbers, number, 0)) for number in range(copies)]


def multiplier(target: Target) -> Multiply:
    def multiply(weights: Sequence[jax.Array], scale: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [linear.multiply(weight, scale, x, target=target) for weight in weights]

    return multiply


def take_turns(
    calls: Sequence[Callable[..., list[jax.Array]]],
    weights: Sequence[jax.Array],
    scale: jax.Array,
    x: jax.Array,
    turns: int,
) -> list[float]:
    """The best seconds of each way; raises if their results differ."""
    best, results = [float("inf")] * len(calls), []
    for call in calls:
        results.append([np.asarray(each) for each in call(weights, scale, x)[:2]])
    for first, other in zip(*results, strict=True):
        assert np.array_equal(first, other), "the two ways differ"
    for _ in range(turns):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call(weights, scale, x))
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def measure_peak(target: Target) -> float:
    """Operations a second of one thread that multiplies tiles and does nothing else."""
    program, shape = Program(target), TileShape(TILE_ROWS, TILE_ROW_BYTES)
    with program.function("multiply", 1) as builder:
        tiles = Tiles(builder, (shape,) * 8)
        with tiles.configured():
            for tile in range(8):
                tiles.zero(tile)
            with builder.loop(0, PEAK_LOOPS):
                for sums in range(4):
                    tiles.add_product(sums, 4 + sums // 2, 6 + sums % 2)
    code = Code(program.compile())
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address("multiply"))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        call(0)
        best = min(best, time.perf_counter() - start)
    products = TILE_ROWS * TILE_ROWS * TILE_ROW_BYTES
    return PEAK_LOOPS * 4 * 2 * products / best


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--matrices", choices=MATRICES, nargs="+", default=list(MATRICES))
    parser.add_argument("--turns", type=int, default=5)
    return parser


if __name__ == "__main__":
    main()
