"""Breaks the server on purpose, for tests of failures: LEVSERVE_FAULTS="nan:3,stall:20:5".

    raise:ROUND             the device round of this number raises; the first few are the probe at the start
    stall:ROUND:SECONDS     this round takes so much longer
    nan:ROUND               the oldest row of this round, or of the next one that decodes, has NaN in its KV
    slow-tokenizer:SECONDS  every text takes so much longer to tokenize
    oom                     the KV cache asks for more memory than any machine has

`cli` checks the variable before anything starts. `install` runs in the worker before the model is loaded, and
replaces functions by faulty ones. Without the variable nothing is replaced.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from levserve.errors import ConfigError
from levserve.settings.settings import FAULTS_VARIABLE

if TYPE_CHECKING:
    from levserve.device.kind import Round
    from levserve.schedule.sequence import RoundPlan

FORMS = {
    "raise": "raise:ROUND",
    "stall": "stall:ROUND:SECONDS",
    "nan": "nan:ROUND",
    "slow-tokenizer": "slow-tokenizer:SECONDS",
    "oom": "oom",
}
HUGE = 2**40  # pages


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    at: float = 0
    seconds: float = 0


def parse_faults(text: str) -> list[Fault]:
    """Raises `ConfigError` for a word that is not a fault."""
    return [_parse(word.strip()) for word in text.split(",")]


def _parse(word: str) -> Fault:
    kind, *given = word.split(":")
    try:
        numbers = [float(number) for number in given]
    except ValueError:
        numbers = [-1.0]
    is_complete = kind in FORMS and len(numbers) == FORMS[kind].count(":")
    if not is_complete or min(numbers, default=0.0) < 0:
        raise ConfigError(
            f"{FAULTS_VARIABLE} must be a comma-separated list of {', '.join(FORMS.values())}; not {word!r}"
        )
    return Fault(kind, seconds=numbers[0]) if kind == "slow-tokenizer" else Fault(kind, *numbers)


def install(faults: list[Fault]) -> None:
    """Makes this process fail as asked."""
    for fault in faults:
        match fault.kind:
            case "oom":
                _ask_for_too_much()
            case "slow-tokenizer":
                _slow_the_tokenizer(fault.seconds)
    _break_rounds([fault for fault in faults if fault.kind in ("raise", "stall", "nan")])


def _ask_for_too_much() -> None:
    from levserve.model import cache

    make_pool = cache.make_pool
    cache.make_pool = lambda config, num_pages, *rest: make_pool(config, HUGE, *rest)


def _slow_the_tokenizer(seconds: float) -> None:
    from levserve.text.tokenizer import Tokenizer

    encode = Tokenizer.encode

    def encode_slowly(tokenizer: Tokenizer, *given: Any, **options: Any) -> list[int]:
        time.sleep(seconds)
        return encode(tokenizer, *given, **options)

    setattr(Tokenizer, "encode", encode_slowly)


def _break_rounds(faults: list[Fault]) -> None:
    from levserve.device.runner import Runner
    from levserve.device.text_runner import TextRunner

    numbers = itertools.count(1)
    for kind in (Runner, TextRunner):
        setattr(kind, "dispatch", _with_faults(kind.dispatch, faults, numbers))


def _with_faults(
    dispatch: Callable[..., Round], faults: list[Fault], numbers: Iterator[int]
) -> Callable[..., Round]:
    def dispatch_with_faults(runner: Any, plan: RoundPlan, *, may_mix: bool = False) -> Round:
        number = next(numbers)
        due = [fault for fault in faults if fault.at <= number and (plan.rows or fault.kind != "nan")]
        for fault in due:
            faults.remove(fault)
            match fault.kind:
                case "raise":
                    raise RuntimeError(f"{FAULTS_VARIABLE}: round {number} raises")
                case "stall":
                    time.sleep(fault.seconds)
                case "nan" if plan.rows[0].sequence.pages:
                    runner.fill_pages(plan.rows[0].sequence.pages[:1], float("nan"))
        return dispatch(runner, plan, may_mix=may_mix)

    return dispatch_with_faults
