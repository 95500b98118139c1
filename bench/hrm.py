#!/usr/bin/env python3
"""How long a token of an HRM brain takes, by the length of its text and the rows computed together.

Each line compares the measured time with a floor: what the operations of a token would take at the speed of one large product of
matrices, which is measured first, in the same run and number format. The model has random weights in the shape of AI-OS's English-v1
unless told otherwise. Needs no file and no server.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from levserve.device.sampling import make_masks, make_memory
from levserve.device.text_programs import Task, TextPrograms, TextShape
from levserve.device.text_rounds import LENGTH, TARGET, TOKENS, Arrays, TextSkeleton, TextState
from levserve.device.text_sizing import plan_text_sizes
from levserve.model.hrm import Hrm
from levserve.model.hrm_config import HrmConfig, hrm_parameter_shapes
from levserve.model.xla import XlaBackend
from levserve.observe.metrics import Metrics

PEAK_SIZES = {"cpu": 2048, "gpu": 8192}
"""Rows and columns of the product that the floor is measured with."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--hidden", type=int, default=512, metavar="N", help="hidden size (default: %(default)s)")
    add(
        "--inner",
        type=int,
        default=768,
        metavar="N",
        help="width of a feed-forward part (default: %(default)s)",
    )
    add("--layers", type=int, default=6, metavar="N", help="of each level (default: %(default)s)")
    add("--experts", type=int, default=8, metavar="N", help="0: dense (default: %(default)s)")
    add("--vocab", type=int, default=151_657, metavar="N", help="tokens (default: %(default)s)")
    add("--lengths", default="32,128,512", metavar="N,N", help="of texts (default: %(default)s)")
    add("--rows", default="1,4", metavar="N,N", help="texts computed together (default: %(default)s)")
    add("--repetitions", type=int, default=5, metavar="N", help="runs of each (default: %(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(argv)


def make_model(options: argparse.Namespace, backend: XlaBackend) -> Hrm:
    config = HrmConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.inner,
        num_heads=8,
        h_layers=options.layers,
        l_layers=options.layers,
        h_cycles=2,
        l_cycles=2,
        num_experts=options.experts,
        experts_per_token=min(2, options.experts),
        max_position=max(read_numbers(options.lengths)),
    )
    random = np.random.default_rng(0)
    dtype = jnp.dtype(options.dtype)
    arrays = {}
    for name, shape in hrm_parameter_shapes(config).items():
        host = random.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        host = host.astype(dtype) if host.ndim > 1 else host
        arrays[name] = jax.device_put(host.view(backend.expert_storage(dtype)) if host.ndim > 2 else host)
    return Hrm.from_arrays(config, arrays, backend=backend)


def measure_peak(platform: str, dtype: jnp.dtype) -> float:
    """Operations a second of one large product."""
    size = PEAK_SIZES.get(platform, 4096)
    one = jnp.ones((size, size), dtype)
    precision = "highest" if dtype == jnp.float32 else "default"  # as the model computes
    product = jax.jit(lambda a, b: jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32))
    times = []
    for _ in range(6):
        start = time.perf_counter()
        product(one, one).block_until_ready()
        times.append(time.perf_counter() - start)
    return float(2 * size**3 / statistics.median(times[1:]))


def measure_run(
    programs: TextPrograms,
    leaves: Arrays,
    state: TextState,
    shape: TextShape,
    options: argparse.Namespace,
) -> tuple[float, TextState]:
    """Seconds of one run of a program, and the state after it: runs donate the buffer of logits."""
    programs.compile_only([shape])
    packed = np.full((shape.rows, TOKENS + shape.length), 7, np.int32)
    packed[:, TARGET], packed[:, LENGTH] = np.arange(shape.rows), shape.length
    times = []
    for _ in range(options.repetitions + 1):
        start = time.perf_counter()
        logits, pooled = programs[shape](leaves, state.logits, packed)
        jax.block_until_ready(pooled)
        state = state._replace(logits=logits)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), state


def read_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    platform = jax.devices()[0].platform
    backend = XlaBackend(platform)
    model = make_model(options, backend)
    lengths, rows = read_numbers(options.lengths), read_numbers(options.rows)
    sizes = plan_text_sizes(
        backend.traits,
        rows=max(rows),
        max_seq_len=max(lengths),
        vocab_size=options.vocab,
        weight_bytes=0,
    )
    leaves, tree = jax.tree.flatten(model)
    state = TextState(
        jnp.zeros((sizes.rows, options.vocab), jnp.float32),
        make_memory(sizes.rows, sizes.max_seq_len),
        make_masks(sizes.rows, options.vocab),
    )
    programs = TextPrograms(tuple(leaves), state, TextSkeleton(tree, backend), sizes, Metrics())
    peak = measure_peak(platform, jnp.dtype(options.dtype))
    print(
        f"{jax.devices()[0].device_kind}, {options.dtype}: a large product runs at {peak / 1e9:,.0f} Gflop/s"
    )
    print("| tokens | rows | ms a run | ms a token | Gflop a token | floor, ms a token | times the floor |")
    print("|---|---|---|---|---|---|---|")
    for length in lengths:
        for count in rows:
            seconds, state = measure_run(
                programs, tuple(leaves), state, TextShape(Task.RUN, count, length), options
            )
            flops = model.config.flops(length)
            floor = flops / peak
            cells = f"{seconds * 1e3:,.1f} | {seconds / count * 1e3:,.1f} | {flops / 1e9:.1f}"
            ratio = seconds / count / floor
            print(f"| {length} | {count} | {cells} | {floor * 1e3:,.1f} | {ratio:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
