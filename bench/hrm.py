#!/usr/bin/env python3
"""Measures the time per token of an HRM brain, by the length of its text and the rows computed together.

Each line compares the measured time with two floors, measured in the same run and number format. The
first is the time that the operations of a token would take at the speed of one large matrix product. The
second is the time of the products of all blocks alone, in their own shapes, one after another, because
narrow matrices do not reach the speed of large ones. It leaves out attention, and of a mixture it
computes only the chosen experts, as one product for all of them. The model has random weights, by
default in the shape of AI-OS's English-v1. Needs no file and no server.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from levserve.device.sampling import make_masks, make_memory
from levserve.device.text_programs import Task, TextPrograms, TextShape
from levserve.device.text_rounds import LENGTH, TARGET, TOKENS, Arrays, TextSkeleton, TextState
from levserve.device.text_sizing import plan_text_sizes
from levserve.model.backend import Backend
from levserve.model.hrm import Hrm
from levserve.model.hrm_config import HrmConfig, hrm_parameter_shapes
from levserve.model.select import choose_text_backend
from levserve.observe.metrics import Metrics

PEAK_SIZES = {"cpu": 2048, "gpu": 8192}
"""Rows and columns of the product that the floor is measured with."""
WARM_UPS = 3


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
    add(
        "--kernels",
        choices=("auto", "xla"),
        default="auto",
        help="as the server's option (default: %(default)s)",
    )
    return parser.parse_args(argv)


def make_config(options: argparse.Namespace) -> HrmConfig:
    return HrmConfig(
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


def make_model(config: HrmConfig, options: argparse.Namespace, backend: Backend) -> Hrm:
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
    return float(2 * size**3 / time_calls(lambda: product(one, one), 5))


def measure_products(config: HrmConfig, num_tokens: int, count: int, options: argparse.Namespace) -> float:
    """Seconds of a run's matrix products over `num_tokens` tokens, with the logits of `count` of them."""
    dtype, hidden, inner = jnp.dtype(options.dtype), config.hidden_size, config.intermediate_size
    precision = "highest" if dtype == jnp.float32 else "default"
    per_token = config.experts_per_token if config.num_experts else 1
    wide = inner if config.num_experts else 2 * inner
    shapes = (
        (3 * hidden, hidden),
        (hidden, hidden),
        (wide, hidden),
        (hidden, inner),
        (config.vocab_size, hidden),
    )
    qkv, out, up, down, head = (jnp.ones(shape, dtype) for shape in shapes)

    def multiply(x: jax.Array, matrix: jax.Array) -> jax.Array:
        product = jnp.einsum("ti,oi->to", x, matrix, precision=precision, preferred_element_type=dtype)
        return product.astype(dtype)

    def block(_: int, x: jax.Array) -> jax.Array:
        x = multiply(multiply(x, qkv)[:, :hidden], out)
        fed = multiply(jnp.concatenate([x] * per_token), up)[:, :inner]
        return multiply(fed, down)[:num_tokens]

    def products(x: jax.Array) -> jax.Array:
        return multiply(jax.lax.fori_loop(0, config.num_blocks, block, x)[:count], head)

    run = jax.jit(
        products,
        compiler_options=choose_text_backend(jax.devices()[0].platform, config.block).compiler_options(
            num_tokens=num_tokens, is_prefill=True, is_quantized=False
        ),
    )
    x = jnp.ones((num_tokens, hidden), dtype)
    return time_calls(lambda: run(x), options.repetitions)


def time_calls(call: Callable[[], jax.Array], repetitions: int) -> float:
    """Median seconds of a call. The first calls are not counted: a GPU records graphs in them."""
    times = []
    for _ in range(WARM_UPS + repetitions):
        start = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UPS:])


def measure_run(
    programs: TextPrograms,
    leaves: Arrays,
    state: TextState,
    shape: TextShape,
    options: argparse.Namespace,
) -> tuple[float, TextState]:
    """Seconds of one run of a program, and the state after it: runs donate the buffer of logits."""
    programs.compile_only([shape])
    # Equal tokens would all choose the same experts.
    packed = np.random.default_rng(0).integers(
        options.vocab, size=(shape.rows, TOKENS + shape.length), dtype=np.int32
    )
    packed[:, TARGET], packed[:, LENGTH] = np.arange(shape.rows), shape.length
    logits = state.logits

    def run() -> jax.Array:
        nonlocal logits
        pooled: jax.Array
        logits, pooled = programs[shape](leaves, logits, packed)
        return pooled

    return time_calls(run, options.repetitions), state._replace(logits=logits)


def read_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def count_flops(config: HrmConfig, length: int) -> int:
    """Operations of one run over a text, with the logits of one position: two for each multiply-add."""
    hidden, inner = config.hidden_size, config.intermediate_size
    fed = 6 * hidden * inner
    if config.num_experts:
        fed = 4 * config.experts_per_token * hidden * inner + 2 * hidden * config.num_experts
    a_token = 8 * hidden * hidden + fed + 4 * length * hidden
    return config.num_blocks * length * a_token + 2 * hidden * config.vocab_size


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    platform = jax.devices()[0].platform
    config = make_config(options)
    backend = choose_text_backend(platform, config.block, options.kernels)
    model = make_model(config, options, backend)
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
        f"{jax.devices()[0].device_kind}, {options.dtype}, {backend.describe()}: "
        f"a large product runs at {peak / 1e9:,.0f} Gflop/s"
    )
    print(
        "| tokens | rows | ms a run | ms a token | floor, ms a token | times the floor | products alone, ms | times these |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for length in lengths:
        for count in rows:
            shape = TextShape(Task.RUN, count, length)
            seconds, state = measure_run(programs, tuple(leaves), state, shape, options)
            floor = count_flops(config, length) / peak
            products = measure_products(config, count * length, count, options)
            cells = (
                f"{seconds * 1e3:,.2f} | {seconds / count * 1e3:,.3f} | {floor * 1e3:,.3f} | {seconds / count / floor:.2f}",
                f"{products * 1e3:,.2f} | {seconds / products:.2f}",
            )
            print(f"| {length} | {count} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
