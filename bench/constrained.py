#!/usr/bin/env python3
"""Measures what constraining text to a schema or an expression costs the request itself and others.

    python bench/constrained.py
    python bench/constrained.py --streams 1 8 --repeats 5
    python bench/constrained.py --streams --repeats 12

The engine runs in this process, without HTTP. The first table compares constrained streams ("held") with
free ones that have the same prompt and number of tokens; rates are of the tokens after the first, from
the first to the last. The second table compares free streams beside constrained ones with free streams
beside other free ones; without a number after `--streams` it is the only one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from speculate import running

from levserve.engine.engine import Engine
from levserve.models.build import Loaded
from levserve.schedule.constraint import Constraint
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.text.chat import render_chat
from levserve.text.grammar import GrammarKind, GrammarText

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "year_of_birth": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "profession": {"type": "string", "maxLength": 30},
    },
    "required": ["name", "year_of_birth", "profession"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 8, "maxItems": 12}
TEXT = (
    "Ada Lovelace, born in 1815, was a mathematician. Johann Wolfgang von Goethe, born in 1749, was a poet. "
    "Marie Curie, born in 1867, was a physicist. Alan Turing, born in 1912, was a mathematician."
)


class Task(NamedTuple):
    prompt: str
    kind: GrammarKind
    value: Any


TASKS = {
    "schema in the prompt": Task(
        f"{TEXT}\n\nList these people and others like them as JSON that fulfils this schema:\n{json.dumps(PEOPLE)}",
        GrammarKind.JSON_SCHEMA,
        PEOPLE,
    ),
    "schema not in the prompt": Task(f"{TEXT}\n\nWho else is like them?", GrammarKind.JSON_SCHEMA, PEOPLE),
    "any JSON object": Task(f"{TEXT}\n\nGive me that as JSON.", GrammarKind.JSON_SCHEMA, {"type": "object"}),
    "an expression": Task("When was that?", GrammarKind.REGEX, "([0-9]{4}-[0-9]{2}-[0-9]{2}, ){40}"),
}


class Measured(NamedTuple):
    tokens_per_second: float
    lengths: list[int]


def main() -> None:
    options, flags = _parser().parse_known_args()
    with running(0, flags) as (engine, loaded):
        print(f"{loaded.model.name}, temperature {options.temperature} {' '.join(flags)}", flush=True)
        for streams in options.streams:
            for name, task in TASKS.items():
                compare(engine, loaded, name, task, streams, options)
        compare_neighbours(engine, loaded, options)


def compare(
    engine: Engine, loaded: Loaded, name: str, task: Task, streams: int, options: argparse.Namespace
) -> None:
    prompt, constraint = prepare(loaded, task)
    held: list[Measured] = []
    free: list[Measured] = []
    counts = [counted(engine, name) for name in ("constraint_misfits", "constraint_forced_tokens")]
    for repeat in range(options.repeats + 1):
        seeds = range(streams * repeat, streams * (repeat + 1))
        made = [ask(prompt, options.tokens, options.temperature, seed, constraint) for seed in seeds]
        held.append(measure(engine, loaded, made, range(streams)))
        lengths = zip(seeds, held[-1].lengths)
        made = [ask(prompt, max(length, 2), options.temperature, seed) for seed, length in lengths]
        free.append(measure(engine, loaded, made, range(streams)))
    misfits, forced = (
        counted(engine, name) - before
        for name, before in zip(("constraint_misfits", "constraint_forced_tokens"), counts)
    )
    total = sum(sum(one.lengths) for one in held)
    slow, fast = (statistics.median(one.tokens_per_second for one in runs[1:]) for runs in (held, free))
    print(
        f"{streams:3d} x {name:26s} {fast:7.1f} free, {slow:7.1f} held tok/s  x {slow / fast:4.2f}  "
        f"{misfits / total:5.1%} misfits, {forced / total:5.1%} forced",
        flush=True,
    )


def compare_neighbours(engine: Engine, loaded: Loaded, options: argparse.Namespace) -> None:
    """Watches half of the streams; the other half is free, or constrained to a schema."""
    prompt, constraint = prepare(loaded, TASKS["schema not in the prompt"])
    half = options.neighbours
    beside: dict[str, list[float]] = {"free": [], "held": []}
    for repeat in range(options.repeats + 1):
        ways = [("free", None), ("held", constraint)]
        for name, other in ways if repeat % 2 else reversed(ways):  # the order must not favour one of them
            made = [ask(prompt, options.tokens, 0.0, seed) for seed in range(half)]
            made += [ask(prompt, options.tokens * 2, 0.0, half + seed, other) for seed in range(half)]
            found = measure(engine, loaded, made, range(half))
            if repeat:
                beside[name].append(found.tokens_per_second)
    free, held = (statistics.median(beside[name]) for name in ("free", "held"))
    print(
        f"{half} free streams beside {half} free ones {free:.1f} tok/s, beside held ones {held:.1f}  x {held / free:.3f}"
    )


def prepare(loaded: Loaded, task: Task) -> tuple[tuple[int, ...], Constraint]:
    prompt = render_chat(loaded.model.tokenizer, [{"role": "user", "content": task.prompt}])
    text = task.value if isinstance(task.value, str) else json.dumps(task.value)
    return tuple(prompt), loaded.model.grammars.compile(GrammarText(task.kind, text, "task"))


def ask(
    prompt: tuple[int, ...], tokens: int, temperature: float, seed: int, constraint: Constraint | None = None
) -> GenerationRequest:
    """A request for exactly `tokens` tokens, unless its constraint ends the text earlier."""
    return GenerationRequest(
        f"{time.monotonic_ns()}-{seed}",
        prompt,
        tokens,
        Sampling(temperature, seed=seed),
        constraint=constraint,
    )


def measure(engine: Engine, loaded: Loaded, requests: list[GenerationRequest], watched: range) -> Measured:
    """The rate of the watched streams, from the first token of any of them to the last token of all."""
    lengths = [0] * len(requests)
    first, last, num_first = 0.0, 0.0, 0
    stream = engine.submit(requests, loaded.model)
    ended = set()
    for index, batch in stream:
        now = time.monotonic()
        lengths[index] += len(batch.tokens)
        if index in watched:
            if not first:
                first, num_first = now, len(batch.tokens)
            last = now
            if batch.finish is not None:
                ended.add(index)
        if len(ended) == len(watched):
            stream.close()
    while engine.metrics.registry.get_sample_value("levserve_requests_running"):
        time.sleep(0.01)
    num_tokens = sum(lengths[index] for index in watched) - num_first
    return Measured(num_tokens / max(last - first, 1e-9), lengths)


def counted(engine: Engine, name: str) -> float:
    return engine.metrics.registry.get_sample_value(f"levserve_{name}_total") or 0.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = "any other flag is the server's: --model FILE --quantize none"
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8])
    parser.add_argument(
        "--neighbours", type=int, default=4, help="free streams that are watched beside others"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
