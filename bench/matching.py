#!/usr/bin/env python3
"""Measures what constraining text to a grammar costs the host for each token, without a device.

    python bench/matching.py
    python bench/matching.py --rows 64 --misfits 0.1

The scheduler plans and commits rounds of 8 steps whose tokens are recorded: a text that fits the
grammar, as tokens of the model. With `--misfits`, that share of the sampled tokens is replaced by a
token that does not fit, as a model would sample that was not told of the grammar; then masks are made as
well. Times are the thread's CPU time, on which other programs on the machine have little effect. "free"
is the cost of a row without a grammar, and the ratio is how many times as much a row with the grammar
("held") costs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from constrained import PEOPLE

from levserve.device.packing import pack_masks
from levserve.schedule.budget import Budget
from levserve.schedule.commit import Sampled
from levserve.schedule.constraint import Constraint
from levserve.schedule.pages import PagePool
from levserve.schedule.request import GenerationRequest
from levserve.schedule.scheduler import Scheduler
from levserve.schedule.sequence import RoundPlan, Sequence
from levserve.text.grammar import GrammarKind, Grammars, GrammarText
from levserve.text.tokenizer import Tokenizer, load_tokenizer
from levserve.weights.bundled import find_bundled

STEPS = 8
NAMES = (
    "Ada Lovelace",
    "Johann Wolfgang von Goethe",
    "Marie Curie",
    "Alan Turing",
    "Emmy Noether",
    "Leonhard Euler",
    "Sofia Kovalevskaya",
    "Srinivasa Ramanujan",
)
JOBS = ("mathematician", "poet", "physicist")
RECORDS = [
    {"name": name, "year_of_birth": 1700 + 31 * number, "profession": JOBS[number % 3]}
    for number, name in enumerate(NAMES)
]


class Recorded(NamedTuple):
    kind: GrammarKind
    grammar: str
    text: str


RECORDED = {
    "schema of records": Recorded(GrammarKind.JSON_SCHEMA, json.dumps(PEOPLE), json.dumps(RECORDS)),
    "any JSON object": Recorded(
        GrammarKind.JSON_SCHEMA, '{"type": "object"}', json.dumps({"people": RECORDS})
    ),
    "an expression": Recorded(GrammarKind.REGEX, "([0-9]{4}-[0-9]{2}-[0-9]{2}, ){40}", "1815-12-10, " * 40),
}


class Spent(NamedTuple):
    """Microseconds of the host for each token that was kept: planning and committing, and making masks."""

    matching: float
    masks: float


def main() -> None:
    options = _parser().parse_args()
    path = options.model or find_bundled(Path.home() / ".cache" / "levserve", print)
    tokenizer = load_tokenizer(path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, lambda seconds: None)
    print(f"{path.name}, {options.rows} rows, rounds of {STEPS}, {options.misfits:.0%} misfits", flush=True)
    for name, recorded in RECORDED.items():
        constraint = grammars.compile(GrammarText(recorded.kind, recorded.grammar, "grammar"))
        tokens = tokenizer.encode_plain(recorded.text)
        free = spend(tokens, None, tokenizer, options)
        held = spend(tokens, constraint, tokenizer, options)
        added = held.matching - free.matching
        print(
            f"{name:18s} free {free.matching:5.2f}, held {held.matching:5.2f} us a token  "
            f"x {held.matching / free.matching:4.2f}  the grammar {added:5.2f}, masks {held.masks:5.2f}",
            flush=True,
        )


def spend(
    tokens: list[int], constraint: Constraint | None, tokenizer: Tokenizer, options: argparse.Namespace
) -> Spent:
    """The median of several runs, after one that is not counted."""
    runs = [
        run(tokens, constraint, tokenizer, options.rows, options.misfits) for _ in range(options.repeats + 1)
    ]
    matching = statistics.median(spent.matching for spent in runs[1:])
    return Spent(matching, statistics.median(spent.masks for spent in runs[1:]))


def run(
    tokens: list[int], constraint: Constraint | None, tokenizer: Tokenizer, rows: int, misfits: float
) -> Spent:
    """Generates the text once in every row, planned one round ahead as in the device loop."""
    pages = 1 + len(tokens) // 16
    scheduler = Scheduler(PagePool(2 * rows * pages, 16), Budget(rows, STEPS, (16, 64), 4096, 4096))
    for row in range(rows):
        request = GenerationRequest(f"r{row}", (1, row + 2), len(tokens), constraint=constraint)
        scheduler.add(request)
    drawer = Drawer(tokens, misfits, tokenizer)
    matching = masks = 0.0
    num_kept = 0
    in_flight: tuple[RoundPlan, list[Sampled], list[Sampled]] | None = None
    while scheduler.has_work or in_flight is not None:
        begun = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        held = plan.held_sequences
        if held:
            pack_masks(held, rows, -(-tokenizer.vocab_size // 32), rows)
        masked = time.thread_time()
        drawn = None if plan.is_empty else (plan, *drawer.draw(plan))
        committing = time.thread_time()
        updates = [] if in_flight is None else scheduler.commit(*in_flight)
        matching += planned - begun + time.thread_time() - committing
        masks += masked - planned
        num_kept += sum(len(update.batch.tokens) for update in updates)
        in_flight = drawn
    return Spent(matching / num_kept * 1e6, masks / num_kept * 1e6)


class Drawer:
    """Stands in for sampling on the device: gives the recorded tokens, and sometimes one that does not fit.

    A token that is sampled with a mask fits. Tokens after a misfit are void, whatever they are.
    """

    def __init__(self, tokens: list[int], misfits: float, tokenizer: Tokenizer) -> None:
        self._tokens = tokens
        self._misfits = misfits
        self._misfit = tokenizer.encode_plain("\n\n\n")[0]
        self._chooser = random.Random(1)

    def draw(self, plan: RoundPlan) -> tuple[list[Sampled], list[Sampled]]:
        chunks = []
        for chunk in plan.chunks:
            start = len(chunk.sequence.tokens)
            chunks.append(
                Sampled(self._after(chunk.sequence, start, 1, is_masked=True) if chunk.is_last else [])
            )
        rows = []
        for row in plan.rows:
            drawn = self._after(row.sequence, row.position + 1, row.steps, is_masked=row.is_masked)
            rows.append(Sampled(drawn))
        return chunks, rows

    def _after(self, sequence: Sequence, position: int, count: int, *, is_masked: bool) -> list[int]:
        first = position - len(sequence.request.prompt)
        drawn = self._tokens[first : first + count]
        for index in range(int(is_masked), len(drawn)):
            if self._chooser.random() < self._misfits:
                drawn[index] = self._misfit
        return drawn


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF file or a folder; the bundled model if not given")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--misfits", type=float, default=0.0, help="the part of draws that do not fit")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


if __name__ == "__main__":
    main()
