#!/usr/bin/env python3
"""Measures what one stream gains from a draft model: milliseconds a token with and without it.

    python bench/draft.py
    python bench/draft.py --right 0.6 0.8 --speculate 3 --draft-quantize fp8
    python bench/draft.py --shape smollm2-135m --draft-shape smollm2-135m --draft-layers 4 --tokens 64

Weights are random, so that any pair of shapes can be measured without its checkpoints. How many drafted
tokens are right is forced: each is right with the given probability if those before it were. The text is
then meaningless, but the times are realistic. The programs are those that the server runs, planned by its
scheduler, without HTTP. The last two measurements force nothing: the model checks the drafts of random
weights, which are wrong; the scheduler drafts every time in the first, and decides by itself when to
draft in the second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
from decode import SHAPES, random_arrays, random_tokens
from schemes import choose_kept

from levserve.device import rounds
from levserve.device.in_flight import InFlightRound
from levserve.device.program_set import COMPILER_STACK_BYTES
from levserve.device.programs import Shape
from levserve.device.runner import DraftModel, Runner
from levserve.device.sizing import Sizes, plan_sizes
from levserve.model import cache
from levserve.model.config import ModelConfig
from levserve.model.decoder import Blueprint
from levserve.model.quantize import BLOCKS_NAME, FP8_NAME, NARROW, choose_quantization
from levserve.model.rules import Mode
from levserve.model.select import choose_backend
from levserve.observe.metrics import Metrics
from levserve.schedule.budget import Budget
from levserve.schedule.pages import PagePool
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.schedule.scheduler import Scheduler
from levserve.schedule.speculation import Speculation
from levserve.settings.parse import parse_settings

PAGE_SIZE = 32
ROWS = 8
FRACTION = 2**16
JUDGED = rounds.is_drawn


class Part(NamedTuple):
    """A model as the server would hold it."""

    blueprint: Blueprint
    arrays: dict[str, jax.Array]
    storage: jnp.dtype

    @property
    def page_bytes(self) -> int:
        return cache.page_bytes(self.blueprint.config, PAGE_SIZE, self.storage)

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class Run(NamedTuple):
    token_seconds: float
    tokens: list[int]
    num_turns: int
    num_drafted: int
    num_right: int


class Always(Speculation):
    """Always drafts, whether it pays or not; never if `is_on` is False."""

    is_on = True

    def pays(self, num_rows: int) -> bool:
        return self.is_on and num_rows > 0


def main() -> None:
    options = _parser().parse_args()
    device = jax.devices()[0]
    draft_config = SHAPES[options.draft_shape]
    if options.draft_layers:
        draft_config = replace(draft_config, num_layers=options.draft_layers)
    served = make_part(SHAPES[options.shape], options.quantize, device.platform)
    draft = make_part(draft_config, options.draft_quantize, device.platform)
    runner, sizes = build(served, draft, options)
    print(
        f"{options.shape} ({served.weight_bytes / 1e9:.2f} GB) and {options.draft_shape} ({options.draft_quantize}, "
        f"{draft.weight_bytes / 1e9:.2f} GB) on {device.device_kind}: drafts of {sizes.num_draft}, "
        f"{sizes.draft_turns} in a round, prompt {options.prompt}, {options.tokens} tokens",
        flush=True,
    )
    speculation = Always(sizes.num_draft, sizes.draft_turns)
    for share in options.right:
        compile_with(runner, sizes, force(share))
        plain, drafted = compare(runner, sizes, speculation, options)
        show(f"each right with {share:.2f}", plain, drafted)
    compile_with(runner, sizes, JUDGED)
    plain, drafted = compare(runner, sizes, speculation, options)
    show("nothing forced", plain, drafted)
    same = sum(one == other for one, other in zip(plain.tokens, drafted.tokens))
    print(f"{'':22s} {same} of {len(plain.tokens)} tokens are the same without and with drafts")
    itself = Speculation(sizes.num_draft, sizes.draft_turns)
    itself.max_rows = ROWS
    plain, drafted = compare(runner, sizes, itself, options)
    show("left to itself", plain, drafted)


def force(share: float) -> Callable[..., jax.Array]:
    """Makes drafted tokens right with this probability; which ones depends on their positions only."""

    def is_drawn(draft: jax.Array, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        mixed = positions.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA77)
        is_right: jax.Array = (mixed ^ (mixed >> 13)) % FRACTION < round(share * FRACTION)
        return is_right

    return is_drawn


def make_part(config: ModelConfig, quantize: str, platform: str) -> Part:
    dtype = jnp.dtype(jnp.bfloat16)
    narrow = NARROW.get(quantize)
    kept = choose_kept(quantize, config, dtype)
    is_packed = kept is not None
    backend, _ = choose_backend(
        platform, config, quantized=narrow, dtype=dtype, kv_dtype=dtype, is_packed=is_packed
    )
    quantization = kept or choose_quantization(narrow, backend, dtype, in_blocks=quantize == BLOCKS_NAME)
    arrays = random_arrays(config, dtype, quantization)
    return Part(Blueprint(config, backend, quantization), arrays, backend.kv_storage(dtype))


def build(served: Part, draft: Part, options: argparse.Namespace) -> tuple[Runner, Sizes]:
    longest = options.prompt + options.tokens
    flags = ["--speculate", str(options.speculate), "--max-seq-len", str(longest)]
    sizes = plan_sizes(
        parse_settings(flags, {}),
        served.blueprint.backend.traits,
        free_bytes=4 << 30,
        rows=ROWS,
        max_position=served.blueprint.config.max_position,
        page_bytes=served.page_bytes + draft.page_bytes,
        weight_bytes=served.weight_bytes + draft.weight_bytes,
        draft_weight_bytes=draft.weight_bytes,
        draft_page_bytes=draft.page_bytes,
    )
    beside = DraftModel(draft.blueprint, draft.arrays, draft.storage)
    runner = Runner(served.blueprint, served.arrays, sizes, served.storage, Metrics(), beside)
    return runner, sizes


def compile_with(runner: Runner, sizes: Sizes, is_drawn: Callable[..., jax.Array]) -> None:
    """Compiles the few programs that one greedy stream needs, in which `is_drawn` judges drafts."""
    rounds.is_drawn = is_drawn
    mode = Mode.PLAIN if sizes.has_all_modes else Mode.FULL
    drafted = Shape(sizes.verify_sizes[0], mode, is_verify=True, is_draft=True)
    others = [
        Shape(prefill_size(sizes), is_sample_only=sizes.has_all_modes),
        Shape(sizes.chunk_sizes[0], is_draft=True),
        Shape(sizes.row_sizes[0], Mode.GREEDY if sizes.has_all_modes else Mode.FULL),
    ]
    compile_all(runner, [drafted, *(shape for shape in others if shape not in runner.programs._ready)])


def compile_all(runner: Runner, shapes: list[Shape]) -> None:
    """Compiles programs in parallel, even those that are compiled already."""
    start = time.perf_counter()
    threading.stack_size(COMPILER_STACK_BYTES)
    with ThreadPoolExecutor() as compilers:
        list(compilers.map(lambda shape: runner.programs._compile(shape, "startup"), shapes))
    print(f"{'':22s} compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def prefill_size(sizes: Sizes) -> int:
    """The size of the program for prompts; a larger one would take longer to compile."""
    return max(size for size in sizes.chunk_sizes if size <= 512)


def compare(
    runner: Runner, sizes: Sizes, speculation: Speculation, options: argparse.Namespace
) -> tuple[Run, Run]:
    """The median runs without and with drafts, made by turns; the first of each warms up."""
    never = Always(sizes.num_draft, sizes.draft_turns)
    never.is_on = False
    plain: list[Run] = []
    drafted: list[Run] = []
    for number in range(options.repeats + 1):
        prompt = random_tokens(SHAPES[options.shape], options.prompt, number)
        plain.append(generate(runner, sizes, never, prompt, options.tokens))
        drafted.append(generate(runner, sizes, speculation, prompt, options.tokens))
    return with_median(plain[1:]), with_median(drafted[1:])


def with_median(runs: list[Run]) -> Run:
    """The last run, with the median of all times."""
    return runs[-1]._replace(token_seconds=statistics.median(run.token_seconds for run in runs))


def generate(
    runner: Runner, sizes: Sizes, speculation: Speculation | None, prompt: list[int], num_tokens: int
) -> Run:
    """Runs one stream as `ModelLoop` does: planned one round ahead, or after the read where it drafts."""
    budget = Budget(sizes.rows, sizes.round_steps, sizes.chunk_costs, sizes.num_tokens, sizes.chunk_sizes[-1])
    scheduler = Scheduler(PagePool(sizes.num_pages, sizes.page_size), budget, speculation)
    request = GenerationRequest("", tuple(prompt), num_tokens, Sampling(temperature=0.0))
    sequence = scheduler.add(request)
    in_flight: InFlightRound | None = None
    first, began = 0.0, time.perf_counter()
    num_turns = num_drafted = num_right = 0

    def read(in_flight: InFlightRound) -> None:
        nonlocal first, began, num_turns, num_drafted, num_right
        chunks, rows = in_flight.read()
        now = time.perf_counter()
        for row, sampled in zip(in_flight.plan.rows, rows):
            steps = sizes.draft_turns if row.reach else row.steps
            right = sampled.num_accepted if row.reach else len(sampled.tokens) - row.steps
            num_turns += len(sampled.tokens) - right
            num_right += right
            num_drafted += sampled.num_drafted + len(row.draft)
            if speculation is not None and row.reach:
                speculation.note_drafted(len(sampled.tokens), right)
            if speculation is not None and not row.missed and not in_flight.plan.chunks:
                is_verify = in_flight.plan.is_verify
                speculation.note_round(1, (now - began) / steps, is_verify=is_verify, num_steps=steps)
        scheduler.commit(in_flight.plan, chunks, rows)
        first, began = first or now, now

    while scheduler.has_work or in_flight is not None:
        before, in_flight = in_flight, None
        if before is not None and (before.plan.is_verify or scheduler.is_speculating):
            read(before)
            before = None
        plan = scheduler.plan()
        in_flight = None if plan.is_empty else runner.dispatch(plan)
        if before is not None:
            read(before)
    answer = sequence.tokens[len(prompt) :]
    return Run((began - first) / (len(answer) - 1), answer, num_turns, num_drafted, num_right)


def show(name: str, plain: Run, drafted: Run) -> None:
    slow, fast = plain.token_seconds * 1e3, drafted.token_seconds * 1e3
    right = "nothing drafted"
    if drafted.num_drafted:
        right = (
            f"{drafted.num_right / drafted.num_drafted:4.0%} of {drafted.num_drafted} drafted tokens right"
        )
    print(
        f"{name:22s} {slow:7.3f} -> {fast:7.3f} ms a token  x {slow / fast:4.2f}  {right}, "
        f"{len(drafted.tokens) / drafted.num_turns:4.2f} tokens a pass",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--draft-shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--draft-layers", type=int, default=0, help="of the draft model, instead of all")
    ways = ["none", *NARROW, FP8_NAME]
    parser.add_argument("--quantize", choices=ways, default="none")
    parser.add_argument("--draft-quantize", choices=ways, default="int8", help="int8 is the server's default")
    parser.add_argument("--speculate", type=int, default=0, help="tokens of a draft; 0: as the server does")
    parser.add_argument(
        "--right",
        type=float,
        nargs="+",
        default=[0.7, 0.86],
        help="how likely a drafted token is right if those before it were; with 0.86, 70 %% of drafts of 4 are",
    )
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
