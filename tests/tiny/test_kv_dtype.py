"""A KV cache in eight bits: served like any other, in half the memory, and at a known cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from levserve.device.faults import Fault, install
from levserve.device.runner import Runner
from levserve.model import cache
from levserve.schedule.request import FinishReason
from levserve.weights.checkpoint import read_config
from tests.conftest import GOLDEN
from tests.engines import Running, ask, running_engine

PAGE_SIZE, KV_BYTES = 8, 1 << 17
SIZES = (
    "--page-size",
    str(PAGE_SIZE),
    "--kv-memory",
    str(KV_BYTES),
    "--prefill-chunk",
    "32",
    "--round-steps",
    "2",
)


CLOSE = {"fp8": (0.05, 0.2), "int8": (0.005, 0.04)}
"""The least and the most that each format moves the log-probabilities of a random model on average.
Measured: 0.11 and 0.02; a bfloat16 cache moves them by 0.02 too."""


@pytest.fixture(scope="module", params=["fp8", "int8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def running(kv_dtype: str) -> Iterator[Running]:
    with running_engine(GOLDEN / "qwen3", "--dtype", "bfloat16", "--kv-dtype", kv_dtype, *SIZES) as running:
        yield running


def test_the_same_memory_holds_twice_the_tokens_less_their_scales(running: Running, kv_dtype: str) -> None:
    config = read_config(GOLDEN / "qwen3")
    page_bytes = cache.page_bytes(config, PAGE_SIZE, cache.kv_dtype("bfloat16", cache.FP8))
    with_scale = config.head_dim + (cache.SCALE_BYTES if kv_dtype == "int8" else 0)
    num_pages = KV_BYTES // (page_bytes * with_scale // (2 * config.head_dim))
    assert running.loaded.sizes.num_tokens == num_pages * PAGE_SIZE


def test_log_probabilities_are_close_to_the_reference(running: Running, kv_dtype: str) -> None:
    least, most = CLOSE[kv_dtype]
    assert least < running.golden_difference(GOLDEN / "qwen3") < most


def test_known_prompts_are_read_back_and_choices_share_them(running: Running) -> None:
    prompt = [*range(30, 51)]
    (alone,) = running.run(ask(prompt, 12))
    before = running.metric("prefix_hit_tokens_total")
    first = ask(prompt, 12)
    both = running.run(first, ask(prompt, 12, shares_prompt_of=first.request_id))
    assert running.metric("prefix_hit_tokens_total") - before >= 2 * PAGE_SIZE
    assert [answer.tokens for answer in both] == [alone.tokens] * 2


def test_what_is_not_finite_is_seen_and_its_pages_are_cleared(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[number, 9, 8, 7, 6, 5, 4, 3, number] for number in range(20, 24)]
    wanted = [answer.tokens for answer in running.run(*(ask(prompt, 12) for prompt in prompts))]
    monkeypatch.setattr(Runner, "dispatch", Runner.dispatch)  # so that what `install` replaces is put back
    install([Fault("nan", 3)])
    answers = running.run(*(ask(prompt, 12) for prompt in prompts))
    assert [answer.finish for answer in answers].count(FinishReason.POISONED) == 1
    for _ in range(3):  # every page is used again
        running.run(*(ask([40 + number] * 100, 20) for number in range(4)))
        assert [answer.tokens for answer in running.run(*(ask(prompt, 12) for prompt in prompts))] == wanted
