"""The host's work for a round is the same on any number of devices. Calls are counted, because times vary.

The runtime's work for a call does grow with the devices; docs/pages/benchmarks.md has its times.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from levserve.device.in_flight import InFlightRound
from levserve.device.runner import Runner
from levserve.models.load import load
from levserve.observe.metrics import Metrics
from levserve.settings.parse import parse_settings
from tests.conftest import GOLDEN
from tests.engines import ask, cache_folder

PROMPTS = [range(10, 19), range(30, 35)]
NUM_TOKENS = 20
SIZES = ("--page-size", "4", "--prefill-chunk", "16")
"""The sizes of `test_tensor_parallel.py`, so that its compiled programs are found."""


@dataclass
class Work:
    """What the host does in all rounds until the answers are whole."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By the names of a levserve function and of the function it calls, in levserve, numpy, jax or Python."""
    sent: list[tuple[int, list[int]]] = field(default_factory=list)
    """The number of each program that was run, and the bytes of each array that it was given."""
    num_decode_rounds: int = 0


def run_rounds(num_devices: int) -> Work:
    flags = ["--model", str(GOLDEN / "llama"), "--dtype", "float32", "--cache-dir", str(cache_folder())]
    settings = parse_settings(
        [*flags, *SIZES, "--max-running", "4", "--tensor-parallel", str(num_devices)], {}
    )
    loaded = load(settings, Metrics(), report=lambda _: None)
    runner, scheduler, work = loaded.runner, loaded.scheduler, Work()
    assert isinstance(runner, Runner) and len(loaded.description.devices) == num_devices
    runner.announce = lambda number, arrays: work.sent.append((number, [array.nbytes for array in arrays]))
    try:
        for prompt in PROMPTS:
            scheduler.add(ask(prompt, NUM_TOKENS))
        while scheduler.has_work:
            with counted(work.calls):
                in_flight = runner.dispatch(scheduler.plan())
                scheduler.commit(in_flight.plan, *in_flight.read())
            assert isinstance(in_flight, InFlightRound)
            # If every device has the whole array, jax reads that of the first one.
            assert all(output.is_fully_replicated for _, output in in_flight.rows)
            work.num_decode_rounds += bool(in_flight.rows)
    finally:
        runner.free()
    return work


@contextmanager
def counted(calls: Counter[tuple[str, str]]) -> Iterator[None]:
    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and frame.f_back is not None:
            caller, name = frame.f_back, frame.f_code.co_qualname
        elif event == "c_call":
            caller, name = frame, called.__qualname__
        else:
            return
        if name == "ArrayImpl.__array__":
            return  # part of np.asarray, which is counted: numpy reads one device's array without asking jax
        if caller.f_globals.get("__name__", "").startswith("levserve."):
            calls[caller.f_code.co_qualname, name] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.fixture(scope="module")
def alone() -> Work:
    return run_rounds(1)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_the_host_does_for_several_devices_what_it_does_for_one(alone: Work, num_devices: int) -> None:
    shared = run_rounds(num_devices)
    assert shared.calls == alone.calls
    assert shared.sent == alone.sent


def test_a_decode_round_is_a_call_with_one_array_and_a_read(alone: Work) -> None:
    assert alone.calls["Executor.run", "Compiled.__call__"] == len(alone.sent)
    assert all(len(arrays) == 1 for _, arrays in alone.sent)
    assert alone.calls["InFlightRound.read_rows", "asarray"] == alone.num_decode_rounds > 1
