#!/usr/bin/env python3
"""Measures what one stream of a large model gains from drafts taken from its text so far: milliseconds a
token with and without --speculate, on answers that repeat more or less of their prompts.

    python bench/replay.py
    python bench/replay.py --shape llama-1b --speculate 4

Weights are random, so that any shape can be measured without its checkpoint. The answers are those that
the bundled model gave to the prompts of `speculate.py`, recorded in `answers.json`: whatever the model
computes, the sampled tokens are replaced by those of the answer, so that drafts are right exactly where
they would be. The programs are those that the server runs, planned by its scheduler, which drafts only
where that pays, without HTTP.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
from decode import SHAPES
from draft import PAGE_SIZE, ROWS, Run, compile_all, generate, make_part, prefill_size, show, with_median

from levserve.device import rounds
from levserve.device.programs import Shape
from levserve.device.runner import Runner
from levserve.device.sizing import plan_sizes
from levserve.model.quantize import FP8_NAME, NARROW
from levserve.model.rules import Drawn, Mode
from levserve.observe.metrics import Metrics
from levserve.schedule.speculation import Speculation
from levserve.settings.parse import parse_settings

ANSWERS = Path(__file__).parent / "answers.json"
SLOT = 0
"""The slot of the only sequence."""
DRAW = rounds.sample_rows


def main() -> None:
    options = _parser().parse_args()
    answers = json.loads(ANSWERS.read_text())
    device = jax.devices()[0]
    part = make_part(SHAPES[options.shape], options.quantize, device.platform)
    longest = max(len(one["prompt"]) + len(one["answer"]) for one in answers.values())
    pages = -(-longest // PAGE_SIZE)
    flags = ["--speculate", str(options.speculate), "--max-seq-len", str(pages * PAGE_SIZE)]
    sizes = plan_sizes(
        parse_settings(flags, {}),
        part.blueprint.backend.traits,
        free_bytes=4 << 30,
        rows=ROWS,
        max_position=part.blueprint.config.max_position,
        page_bytes=part.page_bytes,
        weight_bytes=part.weight_bytes,
    )
    rounds.sample_rows = draw_answer
    runner = Runner(part.blueprint, part.arrays, sizes, part.storage, Metrics())
    shapes = [
        Shape(prefill_size(sizes), is_sample_only=sizes.has_all_modes),
        Shape(sizes.row_sizes[0], Mode.GREEDY if sizes.has_all_modes else Mode.FULL),
        Shape(sizes.verify_sizes[0], Mode.FULL, is_verify=True),
    ]
    compile_all(runner, shapes)
    print(f"{options.shape} on {device.device_kind}, drafts of {options.speculate}", flush=True)
    for name, text in answers.items():
        prompt, answer = text["prompt"], text["answer"]
        ids = runner._state.memory.edit_ids
        tell = ids.at[SLOT, : len(answer)].set(jnp.asarray(answer, jnp.int32))
        runner._state = runner._state._replace(memory=runner._state.memory._replace(edit_ids=tell))
        plain: list[Run] = []
        drafted: list[Run] = []
        for _ in range(options.repeats + 1):
            plain.append(generate(runner, sizes, None, prompt, len(answer)))
            speculation = Speculation(options.speculate)
            speculation.max_rows = ROWS
            drafted.append(generate(runner, sizes, speculation, prompt, len(answer)))
        assert plain[-1].tokens == drafted[-1].tokens == answer
        show(name, with_median(plain[1:]), with_median(drafted[1:]))


def draw_answer(
    model: Any, hidden: Any, given: Any, positions: jax.Array, state: rounds.State, mode: Mode
) -> Drawn:
    """Samples as usual, but returns the tokens of the answer, which are stored in place of logit edits."""
    drawn = DRAW(model, hidden, given, positions, state, mode)
    place = positions - given.rules.prompt_len
    told = state.memory.edit_ids.at[given.slots, place].get(mode="clip")
    return drawn._replace(tokens=jnp.where(drawn.tokens < 0, drawn.tokens, told))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--quantize", choices=["none", *NARROW, FP8_NAME], default="none")
    parser.add_argument("--speculate", type=int, default=7, help="tokens of a draft (default: 7)")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
