"""Every metric of the engine moves by the right amount: tables of known traffic on a tiny model."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from levserve.device.compile_events import COMPILER_THREAD
from levserve.device.in_flight import InFlightRound
from levserve.device.platform import MIN_COMPILE_SECONDS
from levserve.observe.metrics import Metrics
from levserve.observe.vllm_metrics import VllmMetrics
from levserve.schedule.commit import Sampled
from levserve.schedule.request import FinishReason
from tests.conftest import GOLDEN
from tests.engines import Running, ask, read, running_engine
from tests.pure.test_metrics import parse
from tests.waiting import wait_until

PROMPT = [100 + number for number in range(9)]
FLAGS = ("--page-size", "4", "--kv-pages", "16", "--max-seq-len", "64", "--prefill-chunk", "16")


@pytest.fixture
def jax_keeps_programs() -> Iterator[None]:
    """Makes jax keep programs, as in a server; in other tests it keeps none."""
    before = getattr(jax.config, MIN_COMPILE_SECONDS)
    jax.config.update(MIN_COMPILE_SECONDS, 0.0)
    yield
    jax.config.update(MIN_COMPILE_SECONDS, before)


def counted(metrics: Metrics) -> dict[str, float]:
    """The metrics whose values a table can state exactly: counts and tokens, but no seconds and no gauges."""
    samples = parse(metrics.render().decode())
    exact = re.compile(r"levserve_\w+(_total|_count|tokens_sum|rows_sum)($|{)")
    return {name: value for name, value in samples.items() if exact.match(name)}


class Gate:
    """Limits how many rounds the device thread may read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reads = threading.Semaphore(0)
        self._is_open = True
        read_chunks = InFlightRound.read_chunks  # every read of a round begins with it

        def wait_and_read(in_flight: InFlightRound) -> list[Sampled]:
            while not self._is_open and not self._reads.acquire(timeout=0.05):
                pass
            return read_chunks(in_flight)

        monkeypatch.setattr(InFlightRound, "read_chunks", wait_and_read)

    @contextmanager
    def closed(self, reads: int) -> Iterator[None]:
        """Lets this many reads through, and the others at the end."""
        self._reads = threading.Semaphore(reads)
        self._is_open = False
        try:
            yield
        finally:
            self._is_open = True


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_engine(GOLDEN / "llama", *FLAGS, rows=2, compiles_all=True) as running:
        VllmMetrics(running.engine.metrics)
        running.wait_compiled()
        yield running


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


ONE_ANSWER = {  # 9 prompt tokens and 5 generated: a round for the prompt and the first, four for the others
    "levserve_prompt_tokens_total": 9,
    "levserve_prefill_tokens_total": 9,
    "levserve_generated_tokens_total": 5,
    'levserve_rounds_total{kind="prefill"}': 1,
    'levserve_rounds_total{kind="decode"}': 4,
    'levserve_finished_total{reason="length"}': 1,
    "levserve_queue_seconds_count": 1,
    "levserve_prefill_seconds_count": 1,
    "levserve_ttft_seconds_count": 1,
    "levserve_inter_token_seconds_count": 4,
    "levserve_decode_seconds_count": 1,
    "levserve_request_seconds_count": 1,
    "levserve_round_seconds_count": 5,
    "levserve_batch_rows_count": 4,
    "levserve_batch_rows_sum": 4,
    "levserve_round_tokens_count": 5,
    "levserve_round_tokens_sum": 13,
    "levserve_request_prompt_tokens_count": 1,
    "levserve_request_prompt_tokens_sum": 9,
    "levserve_request_generated_tokens_count": 1,
    "levserve_request_generated_tokens_sum": 5,
    "levserve_request_max_tokens_count": 1,
    "levserve_request_max_tokens_sum": 5,
}
SAME_AGAIN = ONE_ANSWER | {  # two pages of four tokens are found, the ninth token is computed
    "levserve_prefix_hit_tokens_total": 8,
    "levserve_prefill_tokens_total": 1,
    "levserve_round_tokens_sum": 5,
}
PROMPT_ALONE = {
    "levserve_prompt_tokens_total": 3,
    "levserve_prefill_tokens_total": 3,
    'levserve_rounds_total{kind="prefill"}': 1,
    'levserve_finished_total{reason="length"}': 1,
    "levserve_queue_seconds_count": 1,
    "levserve_request_seconds_count": 1,
    "levserve_round_seconds_count": 1,
    "levserve_round_tokens_count": 1,
    "levserve_round_tokens_sum": 3,
    "levserve_request_prompt_tokens_count": 1,
    "levserve_request_prompt_tokens_sum": 3,
    "levserve_request_generated_tokens_count": 1,
    "levserve_request_max_tokens_count": 1,
}
OVERDUE = {  # ended in the queue, before it cost anything
    "levserve_prompt_tokens_total": 3,
    'levserve_finished_total{reason="deadline"}': 1,
    'levserve_deadlines_total{phase="queued"}': 1,
    "levserve_request_seconds_count": 1,
    "levserve_request_prompt_tokens_count": 1,
    "levserve_request_prompt_tokens_sum": 3,
    "levserve_request_generated_tokens_count": 1,
    "levserve_request_max_tokens_count": 1,
    "levserve_request_max_tokens_sum": 5,
}


class TestEngine:
    @pytest.mark.parametrize(
        "request_of, expected",
        [
            (lambda: ask(PROMPT, 5), ONE_ANSWER),
            (lambda: ask(PROMPT, 5), SAME_AGAIN),
            (lambda: ask([7, 8, 9], 0), PROMPT_ALONE),
            (lambda: ask([7, 8, 9], 5, deadline=0.0), OVERDUE),
        ],
        ids=["one answer", "the same again", "a prompt alone", "one that is overdue"],
    )
    def test_a_request_moves_what_it_should_and_nothing_else(
        self, running: Running, request_of: Any, expected: dict[str, float]
    ) -> None:
        running.wait_idle()
        before = counted(running.engine.metrics)
        running.run(request_of())
        running.wait_idle()
        after = counted(running.engine.metrics)
        assert {
            name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)
        } == expected

    def test_a_stop_seen_by_the_reader_is_no_cancel(self, running: Running, gate: Gate) -> None:
        before = running.metric("finished_total", reason="cancelled")
        with gate.closed(reads=3):
            stream = running.submit(ask(PROMPT, 40))
            stream.get(60)
            stream.close(0, finish=FinishReason.STOP)
        read(stream)
        assert running.metric("finished_total", reason="cancelled") == before
        assert running.metric("finished_total", reason="stop") >= 1

    def test_sequences_that_run_and_wait_and_their_pages_are_seen(self, running: Running, gate: Gate) -> None:
        running.wait_idle()
        finished = running.metric("finished_total", reason="cancelled")
        with gate.closed(reads=4):
            stream = running.submit(*(ask([number, 8, 9], 40) for number in (30, 31, 32)))
            wait_until(
                lambda: running.metric("requests_running") == 2 and running.metric("requests_waiting") == 1
            )
            assert (
                2 <= running.metric("kv_pages_used") <= 4
            )  # one for the three tokens of each, and one for those to come
            wait_until(lambda: running.metric("device_heartbeat_age_seconds") > 0.2)
            stream.close()
        read(stream, 3)
        running.wait_idle()
        assert running.metric("finished_total", reason="cancelled") == finished + 3
        assert (running.metric("kv_pages_used"), running.metric("kv_pages_total")) == (0, 16)
        assert running.metric("kv_pages_cached") > 0
        wait_until(lambda: running.metric("device_heartbeat_age_seconds") < 2)

    def test_a_deadline_is_told_with_how_far_the_sequence_was(self, running: Running, gate: Gate) -> None:
        with gate.closed(reads=2):
            deadline = time.monotonic() + 1
            stream = running.submit(ask([40, 41, 42], 40, deadline=deadline))
            stream.get(60)
            wait_until(lambda: time.monotonic() > deadline)
        read(stream)
        assert running.metric("deadlines_total", phase="decode") == 1

    def test_preemptions_are_counted_with_what_they_cost(self, running: Running) -> None:
        running.wait_idle()
        first, second = running.run(ask([50, 51, 52], 40), ask([60, 61, 62], 40))  # 11 pages each, of 16
        assert len(first.tokens) == len(second.tokens) == 40
        assert running.metric("preemptions_total") == 1
        assert 16 < running.metric("preempted_tokens_total") < 43

    @pytest.mark.usefixtures("jax_keeps_programs")
    def test_compiles_are_counted_wherever_they_happen(self, running: Running) -> None:
        assert (
            running.metric("compiles_total", when="startup") >= 3
            and running.metric("compile_seconds_total", when="startup") > 0
        )
        assert running.metric("compiles_total", when="serving") == 0
        programs = running.loaded.runner.programs
        before = running.metric("compiles_total", when="background")
        assert before == len(programs.all_shapes) - len(programs.first_shapes)
        hits, misses = (
            running.metric("compile_cache_hits_total"),
            running.metric("compile_cache_misses_total"),
        )
        factor = random.random()

        def work() -> None:
            jax.jit(lambda x: x * factor).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()

        thread = threading.Thread(target=work, name=COMPILER_THREAD)
        thread.start()
        thread.join()
        work()
        for when, count in (("background", before + 1), ("serving", 1)):
            assert (
                running.metric("compiles_total", when=when) == count
                and running.metric("compile_seconds_total", when=when) > 0
            )
        assert running.metric("compile_cache_misses_total") == misses + 1
        assert running.metric("compile_cache_hits_total") == hits + 1

    def test_vllms_names_tell_the_same(self, running: Running) -> None:
        samples = parse(running.engine.metrics.render().decode())
        own = {alias: samples[f"levserve_{name}"] for alias, name in VLLM.items()}
        seen = {alias: samples[f'vllm:{alias}{{engine="0",model_name="llama"}}'] for alias in VLLM}
        assert seen == own
        assert sum(value > 0 for value in seen.values()) > 15
        assert samples['levserve_model_info{model="llama",page_size="4",pages="16"}'] == 1
        assert samples['vllm:kv_cache_usage_perc{engine="0",model_name="llama"}'] == 0
        assert (
            samples[
                'vllm:cache_config_info{block_size="4",engine="0",model_name="llama",num_gpu_blocks="16"}'
            ]
            == 1
        )
        success = 'vllm:request_success_total{{engine="0",finished_reason="{}",model_name="llama"}}'
        reasons = {reason: samples[success.format(reason)] for reason in REASONS}
        ended = {
            reason: running.metric("finished_total", reason=reason)
            for reason in (*REASONS, "cancelled", "deadline", "failed")
        }
        assert reasons == {
            "stop": ended["stop"],
            "length": ended["length"],
            "abort": ended["cancelled"] + ended["deadline"],
            "error": ended["failed"],
        }

    def test_a_share_of_the_pages_is_told_while_they_are_held(self, running: Running, gate: Gate) -> None:
        with gate.closed(reads=0):
            stream = running.submit(ask([70, 71, 72], 40))
            wait_until(lambda: running.metric("kv_pages_used") > 0)
            share = running.metric("kv_pages_used") / 16
            assert (
                parse(running.engine.metrics.render().decode())[
                    'vllm:kv_cache_usage_perc{engine="0",model_name="llama"}'
                ]
                == share
            )
            stream.close()
        read(stream)


REASONS = ("stop", "length", "abort", "error")
VLLM = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generated_tokens_total",
    "prefix_cache_queries_total": "prompt_tokens_total",
    "prefix_cache_hits_total": "prefix_hit_tokens_total",
    "gpu_prefix_cache_hits_total": "prefix_hit_tokens_total",
    "spec_decode_num_drafts_total": "drafts_total",
    "spec_decode_num_draft_tokens_total": "draft_tokens_total",
    "spec_decode_num_accepted_tokens_total": "draft_accepted_tokens_total",
    "num_preemptions_total": "preemptions_total",
    "time_to_first_token_seconds_sum": "ttft_seconds_sum",
    "time_to_first_token_seconds_count": "ttft_seconds_count",
    "inter_token_latency_seconds_sum": "inter_token_seconds_sum",
    "time_per_output_token_seconds_count": "inter_token_seconds_count",
    "e2e_request_latency_seconds_sum": "request_seconds_sum",
    "request_queue_time_seconds_sum": "queue_seconds_sum",
    "request_prefill_time_seconds_sum": "prefill_seconds_sum",
    "request_decode_time_seconds_sum": "decode_seconds_sum",
    "request_prompt_tokens_sum": "request_prompt_tokens_sum",
    "request_generation_tokens_sum": "request_generated_tokens_sum",
    "request_max_num_generation_tokens_sum": "request_max_tokens_sum",
    "iteration_tokens_total_count": "round_tokens_count",
}
