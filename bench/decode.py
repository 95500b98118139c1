"""Measures the engine alone: milliseconds per decode step and prefill tokens per second, against the
machine's own floor.

    python bench/decode.py --shape smollm2-135m --rows 4 8 16 --context 256
    python bench/decode.py --shape llama-1b --rows 2 64 256 --context 576 --steps 16
    python bench/decode.py --shape llama-8b --rows 64 --context 576 --steps 16 --quantize fp8 --kv-dtype fp8
    python bench/decode.py --shape llama-8b --rows 2 64 --context 576 --steps 16 --quantize w4
    python bench/decode.py --shape gpt-oss-20b --rows 2 64 256 --context 576 --steps 16 --quantize mxfp4
    python bench/decode.py --shape qwen3-30b-a3b --rows 2 64 256 --context 576 --steps 16 --chunks 512 --prompts 8

Weights are random, so any shape can be measured without its checkpoint; the programs are the ones the
server runs. How fast the machine reads memory and multiplies large matrices is measured first. The floor
is the time to read the weights once and every row's KV once at that speed; of a mixture's experts it
counts those that the rows would choose at random.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from machine import measure_bandwidth, measure_products
from schemes import SCHEMES, choose_kept, random_parts

from levserve.device.programs import Shape
from levserve.device.runner import Runner
from levserve.device.sizing import Sizes
from levserve.jit import waiting
from levserve.jit.target import AMX, detect_target
from levserve.model import cache
from levserve.model.backend import Backend
from levserve.model.balance import BALANCE, can_balance
from levserve.model.config import Activation, ModelConfig
from levserve.model.cpu.backend import CpuBackend
from levserve.model.decoder import Blueprint
from levserve.model.int8_blocks import BLOCK, SCALE_FACTOR
from levserve.model.int8_packing import OFFSET, WIDENED_NIBBLES, is_packable
from levserve.model.packed import Code, Kept, Scheme
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.quantize import (
    FP8_NAME,
    IN_BLOCKS,
    IN_FOUR_BITS,
    NARROW,
    Quantization,
    choose_quantization,
    is_quantized,
    widens_blocks,
)
from levserve.model.rules import Mode
from levserve.model.select import choose_backend
from levserve.observe.metrics import Metrics
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.schedule.sequence import Chunk, RoundPlan, Row, Sequence

SHAPES = {
    "smollm2-135m": ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, 8192, True),
    "smollm2-1.7b": ModelConfig(49152, 2048, 8192, 24, 32, 32, 64, 1e-5, 13e4, 8192, True),
    "qwen3-0.6b": ModelConfig(151936, 1024, 3072, 28, 16, 8, 128, 1e-6, 1e6, 40960, True, qk_norm=True),
    "llama-1b": ModelConfig(128256, 2048, 8192, 16, 32, 8, 64, 1e-5, 5e5, 8192, True),
    "llama-8b": ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, 8192, False),
    "qwen3-30b-a3b": ModelConfig(
        *(151936, 2048, 768, 48, 32, 4, 128, 1e-6, 1e6, 40960, False),
        qk_norm=True,
        num_experts=128,
        experts_per_token=8,
    ),
    "gpt-oss-20b": ModelConfig(
        *(201088, 2880, 2880, 24, 64, 8, 64, 1e-5, 150_000.0, 131_072, False),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        router_bias=True,
        has_sinks=True,
        windows=(128, None) * 12,
        activation=Activation.GELU_QUICK,
        gate_limit=7.0,
        up_offset=1.0,
        num_experts=32,
        experts_per_token=4,
    ),
    # Eight of Mixtral's 32 layers.
    "mixtral-8-layers": ModelConfig(
        *(32000, 4096, 14336, 8, 32, 8, 128, 1e-5, 1e6, 32768, False), num_experts=8, experts_per_token=2
    ),
}
PAGE_SIZE = 32
Q4_0 = Scheme(Code.UINT4, BLOCK, zero=8)
FOUR_BITS_FACTOR = 5.0
"""How many times larger a quantization step of four-bit weights is here than one of eight-bit weights."""
NARROW_SPREAD = 24.0
"""Standard deviation of random int8 weights; five times as much still fits."""


def main() -> None:
    options = _parser().parse_args()
    set_looks(options.looks)
    config = SHAPES[options.shape]
    dtype = jnp.dtype(options.dtype)
    device = jax.devices()[0]
    bandwidth = measure_bandwidth()
    kind = f"{dtype.name if options.quantize == 'none' else options.quantize}, KV {cache.kv_dtype(options.kv_dtype, dtype)}"
    # Few CPUs multiply another type as fast.
    factors = jnp.dtype(jnp.float32) if device.platform == "cpu" else dtype
    print(
        f"{options.shape} in {kind}, on {device.device_kind}, jax {jax.__version__}; "
        f"memory reads {bandwidth / 1e9:.1f} GB/s, products of {factors} make {measure_products(factors) / 1e9:.0f} GFLOP/s"
    )
    runner, sizes, expert_bytes = build(config, dtype, device.platform, options)
    for rows in options.rows:
        # Nothing is prefilled, so the rows' first tokens are put where prefill would leave them.
        firsts = jnp.asarray(random_tokens(config, sizes.rows, rows), jnp.int32)
        runner._state = runner._state._replace(last_tokens=firsts)
        step_seconds = measure_decode(runner, sizes, rows, options)
        weight_bytes = sizes.weight_bytes - round(share_unread(config, rows) * expert_bytes)
        kv_bytes = rows * options.context * sizes.page_bytes // PAGE_SIZE
        floor = (weight_bytes + kv_bytes) / bandwidth
        flops = rows * (
            2 * (num_weights(config) + num_head_weights(config))
            + num_attention_flops(config, options.context)
        )
        print(
            f"decode  rows {rows:4d}  context {options.context:5d}  {step_seconds * 1e3:8.2f} ms/step  {rows / step_seconds:9.0f} tok/s  "
            f"floor {floor * 1e3:7.2f} ms  {floor / step_seconds:5.0%} of it  {(weight_bytes + kv_bytes) / step_seconds / 1e9:7.1f} GB/s  "
            f"{flops / step_seconds / 1e9:8.0f} GFLOP/s",
            flush=True,
        )
    for size in options.chunks:
        seconds = measure_prefill(runner, sizes, config, size, options)
        total = size * options.prompts
        flops = total * (
            2 * num_weights(config) + num_attention_flops(config, size / 2)
        ) + 2 * options.prompts * num_head_weights(config)
        print(
            f"prefill {options.prompts:3d} x {size:5d} tokens  {seconds * 1e3:8.2f} ms  {total / seconds:9.0f} tok/s  "
            f"{flops / seconds / 1e9:8.0f} GFLOP/s",
            flush=True,
        )


def set_looks(looks: int | None) -> None:
    """Sets how often waiting threads of CPU kernels look before they sleep; below zero, they always yield."""
    if looks is not None:
        waiting.LOOKS, waiting.TURN_NANOSECONDS = looks, 2**60
        waiting.MANY_THREADS[detect_target().arch] = 0 if looks >= 0 else None


def num_weights(config: ModelConfig) -> float:
    """Parameters in the matrices of all layers that one token is multiplied with."""
    share = config.experts_per_token / config.num_experts if config.num_experts else 0.0
    return sum(
        math.prod(shape) * (1 if len(shape) == 2 else share)
        for name, shape in parameter_shapes(config).items()
        if len(shape) > 1 and name not in ("embed", "head") and not name.endswith("_bias")
    )


def share_unread(config: ModelConfig, rows: int) -> float:
    """The expected share of the experts that no row chooses, if rows choose at random."""
    if not config.num_experts:
        return 0.0
    return (1 - config.experts_per_token / config.num_experts) ** rows


def num_head_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def num_attention_flops(config: ModelConfig, context: float) -> float:
    """Operations of one token that sees this context: a product with each key, and one with each value."""
    return 4 * context * config.num_layers * config.num_heads * config.head_dim


def build(
    config: ModelConfig, dtype: jnp.dtype, platform: str, options: argparse.Namespace
) -> tuple[Runner, Sizes, int]:
    """Also gives the bytes of the experts' matrices."""
    narrow = NARROW.get(options.quantize)
    kv_dtype = cache.kv_dtype(options.kv_dtype, dtype)
    kept = choose_kept(options.quantize, config, dtype)
    backend, _ = choose_backend(
        platform,
        config,
        kernels=options.kernels,
        quantized=narrow,
        dtype=dtype,
        kv_dtype=kv_dtype,
        is_packed=kept is not None,
    )
    if options.without_amx and isinstance(backend, CpuBackend):
        backend = dataclasses.replace(backend, target=backend.target.without(*AMX))
    if options.experts != "auto":
        backend = with_expert_kernels(backend, options.experts)
    names = [name for name in (*parameter_shapes(config), "head") if is_quantized(name)]
    quantization = kept or choose_quantization(
        narrow,
        backend,
        dtype,
        in_blocks=options.quantize in IN_BLOCKS,
        four_bits=dict.fromkeys(names, Q4_0) if options.quantize in IN_FOUR_BITS else None,
        widens_blocks=widens_blocks(options.quantize, backend),
    )
    arrays = random_arrays(config, dtype, quantization)
    storage = backend.kv_storage(kv_dtype)
    weight_bytes = sum(array.nbytes for array in arrays.values())
    sizes = plan_sizes(config, backend, storage, weight_bytes, options)
    blueprint = Blueprint(config, backend, quantization)
    expert_bytes = sum(array.nbytes for name, array in arrays.items() if ".experts_" in name)
    return Runner(blueprint, arrays, sizes, storage, Metrics()), sizes, expert_bytes


def plan_sizes(
    config: ModelConfig, backend: Backend, storage: jnp.dtype, weight_bytes: int, options: argparse.Namespace
) -> Sizes:
    prefill_row_tokens = backend.traits.prefill_row_tokens
    chunk_sizes = {size * (options.prompts if prefill_row_tokens else 1) for size in options.chunks}
    longest = max([options.context + options.steps, *options.chunks])
    pages_each = -(-longest // PAGE_SIZE)
    rows = max(*options.rows, options.prompts)
    return Sizes(
        rows=rows,
        max_seq_len=pages_each * PAGE_SIZE,
        page_size=PAGE_SIZE,
        num_pages=pages_each * rows,
        page_bytes=cache.page_bytes(config, PAGE_SIZE, storage),
        weight_bytes=weight_bytes,
        row_sizes=tuple(sorted({max(2, rows) for rows in options.rows})),
        chunk_sizes=tuple(sorted(chunk_sizes)) or (prefill_row_tokens or 64,),
        round_steps=options.steps,
        prefill_row_tokens=prefill_row_tokens,
    )


def with_expert_kernels(backend: Backend, kernels: str) -> Backend:
    from levserve.model.gpu.backend import ExpertKernels, GpuBackend  # imports Pallas

    assert isinstance(backend, GpuBackend), "only a GPU has a choice"
    return dataclasses.replace(backend, expert_kernels=ExpertKernels(kernels))


def random_arrays(
    config: ModelConfig, dtype: jnp.dtype, quantization: Quantization | Kept | None
) -> dict[str, jax.Array]:
    """Random arrays like those of a loaded checkpoint, made on the device in the type they are stored in."""
    shapes = parameter_shapes(config)
    schemes = {}
    if isinstance(quantization, Kept):
        schemes, quantization = quantization.by_name(), None
    if quantization is not None and config.tied_head:
        shapes["head"] = shapes["embed"]
    if quantization is not None and quantization.is_balanced and can_balance(config):
        shapes[BALANCE] = (config.hidden_size,)
    arrays: dict[str, jax.Array] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        key = jax.random.key(number)
        if name in schemes:
            parts = random_parts(key, schemes[name], shape, 0.02)
            arrays |= {name + end: part for end, part in parts.items()}
        elif len(shape) == 1 or name.endswith("_bias"):
            arrays[name] = jnp.ones(shape, jnp.float32)
        elif quantization is None or not is_quantized(name):
            arrays[name] = random_matrix(key, shape, dtype, 0.02)
        else:
            scale = 0.02 / NARROW_SPREAD
            per_row = jnp.full(shape[0], scale, jnp.float32)
            per_block = jnp.full((shape[0], shape[1] // BLOCK), scale * SCALE_FACTOR, jnp.float16)
            is_packed = quantization.is_packed and is_packable(*shape)
            if name in dict(quantization.four_bits):
                nibbles, is_widened = (
                    random_nibbles(key, shape),
                    quantization.four_bit_order(shape) == WIDENED_NIBBLES,
                )
                arrays[name] = nibbles if is_packed else nibbles.view(quantization.kept)
                arrays[name] = nibbles.view(jnp.uint16) if is_widened else arrays[name]
                arrays[f"{name}_scale"] = per_block * FOUR_BITS_FACTOR
                continue
            in_blocks = quantization.rounds_in_blocks(config, name, shape[1])
            arrays[name] = random_matrix(key, shape, quantization.kept, NARROW_SPREAD)
            if in_blocks and quantization.widens(name, shape):
                arrays[name] = arrays[name].view(jnp.int16)
                per_block = jnp.concatenate([per_block, per_block], 1)
            elif is_packed:
                arrays[name] = arrays[name].view(jnp.uint8) ^ OFFSET
            arrays[f"{name}_scale"] = per_block if in_blocks else per_row
    return arrays


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_matrix(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, spread: float) -> jax.Array:
    """Compiled as one program, so that no copy in a wider type is made."""
    return (jax.random.normal(key, shape, jnp.bfloat16) * spread).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def random_nibbles(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Random codes of a four-bit matrix, two per byte."""
    return jax.random.bits(key, (shape[0], shape[1] // 2), jnp.uint8)


def measure_decode(runner: Runner, sizes: Sizes, rows: int, options: argparse.Namespace) -> float:
    """Seconds of one decode step."""
    runner.programs.compile_only([Shape(max(2, rows), Mode(options.mode))])
    return statistics.median(time_rounds(runner, sizes, rows, options)[2:]) / int(options.steps)


def time_rounds(runner: Runner, sizes: Sizes, rows: int, options: argparse.Namespace) -> list[float]:
    """Seconds of each round. A round is dispatched before the one before it is read, as in the server;
    all rounds decode the same positions."""
    pages_each = sizes.table_width
    sampling = Sampling(
        temperature=0.0 if options.mode == "greedy" else 1.0, top_k=options.top_k, top_p=options.top_p
    )
    sequences = [
        Sequence(
            GenerationRequest(str(row), (1,) * options.context, sizes.max_seq_len, sampling),
            [1] * options.context,
            slot=row,
            pages=list(range(row * pages_each, (row + 1) * pages_each)),
            num_computed=options.context,
        )
        for row in range(rows)
    ]
    seconds: list[float] = []
    in_flight, start = None, time.perf_counter()
    position = options.context - options.steps // 2
    planned = tuple(Row(sequence, sequence.slot or 0, position, options.steps) for sequence in sequences)
    for number in range(options.repeats + 3):
        before, in_flight = (
            in_flight,
            runner.dispatch(RoundPlan((), planned, tuple(sequences) if number == 0 else (), ())),
        )
        if before is not None:
            before.read()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
    assert in_flight is not None
    in_flight.read()
    return seconds


def measure_prefill(
    runner: Runner, sizes: Sizes, config: ModelConfig, size: int, options: argparse.Namespace
) -> float:
    """Seconds until the first tokens of `--prompts` prompts of `size` tokens, submitted together."""
    is_sample_only = sizes.prefill_row_tokens is not None  # as on a GPU
    runner.programs.compile_only(
        [Shape(size * options.prompts if is_sample_only else size, is_sample_only=is_sample_only)]
    )
    pages = -(-size // PAGE_SIZE)
    sequences = [
        Sequence(
            GenerationRequest(str(n), (1,) * size, 1),
            random_tokens(config, size, n),
            slot=n,
            pages=list(range(n * pages, (n + 1) * pages)),
        )
        for n in range(options.prompts)
    ]
    chunks = tuple(Chunk(sequence, sequence.slot or 0, 0, size, is_last=True) for sequence in sequences)
    plan = RoundPlan(chunks, (), tuple(sequences), ())
    seconds: list[float] = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        runner.dispatch(plan).read()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def random_tokens(config: ModelConfig, count: int, number: int) -> list[int]:
    """Random tokens, which choose different experts; equal ones would all choose the same."""
    return random.Random(number).choices(range(config.vocab_size), k=count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument(
        "--context", type=int, default=256, help="tokens each row has in the middle of a round"
    )
    parser.add_argument("--steps", type=int, default=1, help="decode steps in a round")
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="prefill sizes to measure as well")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of such a size, computed together")
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], default="greedy")
    parser.add_argument(
        "--top-k", type=int, default=0, help="of a draw, which is made in the modes plain and full"
    )
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    ways = ["none", *NARROW, FP8_NAME, *SCHEMES]
    parser.add_argument("--quantize", choices=ways, default="none")
    parser.add_argument("--kv-dtype", choices=["auto", "bfloat16", "fp8", "int8"], default="auto")
    parser.add_argument("--kernels", choices=("auto", "xla"), default="auto", help="as the server's option")
    parser.add_argument("--without-amx", action="store_true", help="CPU kernels do not use matrix units")
    parser.add_argument(
        "--experts",
        choices=["auto", "triton", "mosaic", "both"],
        default="auto",
        help="the GPU kernels of a mixture's experts; both: Triton for the first product, Mosaic GPU for the second",
    )
    parser.add_argument(
        "--looks",
        type=int,
        help="how often a waiting thread of a CPU kernel looks before it sleeps; -1: it yields",
    )
    parser.add_argument("--repeats", type=int, default=12)
    return parser


if __name__ == "__main__":
    main()
