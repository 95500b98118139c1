"""Measures the experts of one layer with Triton and with Mosaic GPU kernels, on an NVIDIA H100 or H200.

    python bench/experts.py --shapes qwen3-30b-a3b mixtral-8-layers --tokens 1024 4096

First it checks both against a dense computation in float32, with tokens that choose experts at random,
that mostly choose the same experts, and that are padding in part. Then it prints the microseconds of all
kernels together, for both ways, and of each kernel of Mosaic GPU's way. `--widths` replaces the experts'
own width, to find where one way overtakes the other.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from decode import SHAPES, random_matrix

from levserve.model.backend import ExpertChoice, ExpertRule
from levserve.model.config import Activation, ModelConfig, Routing
from levserve.model.gpu.expert_blocks import BLOCK, block_pairs
from levserve.model.gpu.expert_plan import choose_plan
from levserve.model.gpu.expert_rows import gather_rows, sum_results
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.grouped_experts import mix_grouped
from levserve.model.gpu.mosaic_experts import mix_blocks
from levserve.model.gpu.mosaic_product import multiply_blocks

GATE = Gate(Activation.SILU, is_gated=True, limit=None, up_offset=0.0)
ROUTINGS = ("even", "skewed", "padded")
Matrices = tuple[jax.Array, jax.Array]
Way = Callable[..., jax.Array]
Ways = dict[str, Way]


def main() -> None:
    options = _parser().parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for shape in options.shapes:
        for width in options.widths or [SHAPES[shape].intermediate_size]:
            measure_shape(replace(SHAPES[shape], intermediate_size=width), options.tokens)


def measure_shape(config: ModelConfig, tokens: list[int]) -> None:
    experts, width, embed = config.num_experts, config.intermediate_size, config.hidden_size
    print(
        f"{experts} experts of {width}, {config.experts_per_token} of them for each token of {embed}",
        flush=True,
    )
    gate_up, down = (
        random_matrix(jax.random.key(number), shape, jnp.bfloat16, 0.02)
        for number, shape in enumerate(((experts, 2 * width, embed), (experts, embed, width)))
    )
    for num_tokens in tokens:
        ways = ways_of(config, (gate_up, down), num_tokens)
        for routing in ROUTINGS:
            attempt(check, config, (gate_up, down), num_tokens, routing, ways)
        attempt(measure, config, (gate_up, down), num_tokens, ways)


def attempt(function: Callable[..., None], *given: object) -> None:
    """Prints an exception instead of raising it: a way that fails must not hide the others' times."""
    try:
        function(*given)
    except Exception as error:
        print(f"  FAILED {type(error).__name__}: {str(error)[:600]}", flush=True)


def make_tokens(config: ModelConfig, num_tokens: int, routing: str) -> tuple[jax.Array, ExpertChoice]:
    rng = np.random.default_rng(num_tokens)
    scores = rng.standard_normal((num_tokens, config.num_experts))
    if routing == "skewed":
        scores[: num_tokens * 3 // 4, : config.experts_per_token] += 100.0
    experts = np.argsort(-scores, axis=1)[:, : config.experts_per_token].astype(np.int32)
    if routing == "padded":
        experts[rng.random(num_tokens) < 0.4] = config.num_experts
    weights = rng.random(experts.shape).astype(np.float32)
    weights /= weights.sum(1, keepdims=True)
    x = jnp.asarray(rng.standard_normal((num_tokens, config.hidden_size)), jnp.bfloat16)
    return x, ExpertChoice(jnp.asarray(experts), jnp.asarray(weights))


@jax.jit
def mix_densely(x: jax.Array, choice: ExpertChoice, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Every expert for every token in float32, one expert after another."""
    multiply = functools.partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        gate, up = jnp.split(multiply(x.astype(jnp.float32), gate_up[number].astype(jnp.float32).T), 2, 1)
        result = multiply(GATE.apply((gate, up)), down[number].astype(jnp.float32).T)
        weight = jnp.where(choice.experts == number, choice.weights, 0.0).sum(1)
        return total + weight[:, None] * result

    nothing = jnp.zeros((len(x), down.shape[1]), jnp.float32)
    mixed: jax.Array = jax.lax.fori_loop(0, len(gate_up), add, nothing)
    return mixed


def ways_of(config: ModelConfig, matrices: Matrices, num_tokens: int) -> Ways:
    rule = ExpertRule(
        config.num_experts, config.experts_per_token, Routing(), is_gated=True, activation=Activation.SILU
    )
    plan = choose_plan(num_tokens, rule, *matrices, jnp.dtype(jnp.bfloat16))
    assert plan is not None
    return {
        "triton": functools.partial(mix_grouped, plan=plan),
        "mosaic": functools.partial(mix_blocks, gate=GATE),
    }


def check(config: ModelConfig, matrices: Matrices, num_tokens: int, routing: str, ways: Ways) -> None:
    x, choice = make_tokens(config, num_tokens, routing)
    wanted = np.asarray(mix_densely(x, choice, *matrices))
    is_real = np.asarray(choice.experts)[:, 0] < config.num_experts
    for name, mix in ways.items():
        attempt(
            compare, f"{num_tokens} tokens {routing:7s} {name}", mix, x, choice, matrices, wanted, is_real
        )


def compare(
    name: str,
    mix: Way,
    x: jax.Array,
    choice: ExpertChoice,
    matrices: Matrices,
    wanted: np.ndarray,
    is_real: np.ndarray,
) -> None:
    got = [np.asarray(mix(x, choice, *matrices))[is_real] for _ in range(3)]
    off = np.abs(got[0] - wanted[is_real]).max() / np.abs(wanted[is_real]).max()
    is_repeated = all((one == got[0]).all() for one in got)
    again = "" if is_repeated else ", NOT THE SAME AGAIN"
    print(f"  check {name} off by {off:.2e} of the largest number{again}", flush=True)


def measure(config: ModelConfig, matrices: Matrices, num_tokens: int, ways: Ways) -> None:
    gate_up, down = matrices
    x, choice = make_tokens(config, num_tokens, "even")
    flops = 6.0 * choice.experts.size * config.hidden_size * config.intermediate_size
    for name, mix in ways.items():
        attempt(report, f"{num_tokens} tokens, all, {name}", flops, mix, x, choice, gate_up, down)
    find_blocks = jax.jit(functools.partial(block_pairs, num_experts=config.num_experts))
    blocks = find_blocks(choice.experts)
    whole, half = np.asarray(blocks.counts)
    used = (2 * whole + half) * BLOCK
    print(f"  tiles {whole} whole, {half} half: {choice.experts.size / used:.0%} of {used} rows are pairs")
    report(f"{num_tokens} tokens, blocks", 0.0, find_blocks, choice.experts)
    counts = config.num_experts, config.experts_per_token
    gather = jax.jit(lambda x, blocks: gather_rows(x, blocks, *counts))
    report(f"{num_tokens} tokens, gather", 0.0, gather, x, blocks)
    rows = gather(x, blocks)
    hidden = jnp.ones((len(rows), config.intermediate_size), x.dtype)
    results = jnp.ones_like(rows)
    report(f"{num_tokens} tokens, sum", 0.0, jax.jit(sum_results), results, choice.weights, blocks)
    up = jax.jit(functools.partial(multiply_blocks, gate=GATE))
    attempt(report, f"{num_tokens} tokens, up", flops * 2 / 3, up, rows, gate_up, blocks)
    multiply = jax.jit(functools.partial(multiply_blocks, gate=None))
    attempt(report, f"{num_tokens} tokens, down", flops / 3, multiply, hidden, down, blocks)


def report(name: str, flops: float, function: Callable[..., object], *given: object) -> None:
    seconds = measure_call(function, *given)
    rate = f"  {flops / seconds / 1e12:6.0f} TFLOP/s" if flops else ""
    print(f"  {name:44s} {seconds * 1e6:8.1f} us{rate}", flush=True)


def measure_call(function: Callable[..., object], *given: object) -> float:
    """Seconds, from the difference between many calls and few."""

    def seconds_for(times: int) -> float:
        start = time.perf_counter()
        result = None
        for _ in range(times):
            result = function(*given)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    seconds_for(3)
    few, many = (min(seconds_for(times) for _ in range(3)) for times in (10, 40))
    return (many - few) / 30


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-30b-a3b", "mixtral-8-layers"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024])
    parser.add_argument("--widths", type=int, nargs="+", help="of an expert, in place of the shape's own")
    return parser


if __name__ == "__main__":
    main()
