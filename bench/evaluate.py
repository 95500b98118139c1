"""Scores multiple-choice questions as lm-evaluation-harness does, and shows what batching them gains.

    python bench/evaluate.py --questions 40

One open model scores the same number of pairs in three ways: one request after another with nothing
shared, because each prompt begins with a different number; one request after another with shared
beginnings in the prefix cache; and all through `Evaluator`. The questions of each way have their own
wording, so that no way finds prefixes of another. The last two lines are the ratios.
"""

from __future__ import annotations

import argparse
import random
import time

import levserve
from levserve.api.model import Model
from levserve.evaluation.evaluator import Evaluator

CITIES = ["Paris", "Rome", "Madrid", "Vienna", "Oslo", "Athens", "Lisbon", "Dublin", "Warsaw", "Prague"]
THINGS = ["a bridge", "a library", "a market", "a harbour", "a museum", "a school", "a garden", "a tower"]
Pairs = list[tuple[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="What to open. [default: the bundled model]")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--examples", type=int, default=5, help="Answered questions before each question.")
    parser.add_argument("--max-running", type=int, default=16)
    options = parser.parse_args()
    shape = options.questions, options.choices, options.examples
    with levserve.open(options.model, max_running=options.max_running, max_seq_len=2048) as model:
        Evaluator(model).loglikelihood(make_task("zero", 4, *shape[1:]))  # compiles what is left
        unshared = time_sequential(model, make_task("one", *shape), is_numbered=True)
        sequential = time_sequential(model, make_task("two", *shape), is_numbered=False)
        together = time_together(model, make_task("three", *shape))
    print(f"one request after another, sharing nothing   {unshared:7.1f} s")
    print(f"one request after another, prefix cache      {sequential:7.1f} s")
    print(f"all through Evaluator                        {together:7.1f} s")
    print(f"{sequential / together:.2f} x faster than one request after another with the prefix cache")
    print(f"{unshared / together:.2f} x faster than one request after another")


def make_task(name: str, num_questions: int, num_choices: int, num_examples: int) -> Pairs:
    """Every question follows the same answered ones, and each of its choices makes a pair."""
    draw = random.Random(name)
    examples = "".join(f"{_question(draw, name)} {draw.choice(CITIES)}\n\n" for _ in range(num_examples))
    pairs: Pairs = []
    for _ in range(num_questions):
        context = examples + _question(draw, name)
        pairs += [(context, f" {city}") for city in draw.sample(CITIES, num_choices)]
    return pairs


def _question(draw: random.Random, name: str) -> str:
    seen = ", ".join(draw.sample(THINGS, 4))
    year, age = draw.randrange(1800, 2000), draw.randrange(10, 90)
    return (
        f"Traveller {name} went to a city in {year}, aged {age}, and saw {seen} before it rained. "
        "Which of the cities of the old world was it?\nAnswer:"
    )


def time_sequential(model: Model, pairs: Pairs, *, is_numbered: bool) -> float:
    start = time.monotonic()
    for number, (context, continuation) in enumerate(pairs):
        model.score([(f"{number}. {context}" if is_numbered else context, continuation)])
    return time.monotonic() - start


def time_together(model: Model, pairs: Pairs) -> float:
    start = time.monotonic()
    found = Evaluator(model).loglikelihood(pairs)
    assert len(found) == len(pairs) and all(logprob < 0 for logprob, _ in found)
    return time.monotonic() - start


if __name__ == "__main__":
    main()
