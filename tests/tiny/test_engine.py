"""The whole engine on tiny models: right tokens in any company, nothing lost, nothing compiled late."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.device.in_flight import InFlightRound, PrefillRow
from levserve.device.programs import Programs, Shape
from levserve.device.rounds import ChunkOutput
from levserve.device.sizing import Sizes, plan_sizes
from levserve.jit import code_cache
from levserve.model import cache
from levserve.model.rules import Mode
from levserve.schedule.commit import Sampled
from levserve.schedule.request import FinishReason
from levserve.schedule.sequence import Chunk, RoundPlan, Sequence
from tests.conftest import FAMILIES, GOLDEN
from tests.engines import Running, ask, read, running_engine
from tests.waiting import COMPILE_SECONDS, wait_until

ROWS = 16
# Engines of the same sizes find the programs that the first of them compiled; compiling takes most of the
# time of these tests.
SMALL = ("--page-size", "4", "--prefill-chunk", "16")
LLAMA = ("--page-size", "4", "--kv-pages", "512", "--prefill-chunk", "32")
LARGE_CHUNKS = ("--page-size", "4", "--kv-pages", "256", "--prefill-chunk", "128")
CROWDED = ("--page-size", "4", "--kv-pages", "40", "--prefill-chunk", "32")


def cases_of(family: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((GOLDEN / family / "golden.json").read_text())["cases"]
    return cases


def in_short_rows(*args: Any, **given: Any) -> Sizes:
    """Sizes as on a GPU, but small: the only prefill program has four rows, so prompts share it at once."""
    return replace(plan_sizes(*args, **given), chunk_sizes=(32,), prefill_row_tokens=8)


@pytest.fixture(scope="module")
def llama() -> Iterator[Running]:
    with running_engine(GOLDEN / "llama", *LLAMA, rows=ROWS, compiles_all=True) as running:
        yield running


CROWD = [ask([100 + number, 7, number], 24, temperature=0.9, top_k=5 + number) for number in range(15)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_served_in_one_batch_matches_its_reference(family: str) -> None:
    cases = cases_of(family)
    with running_engine(GOLDEN / family, *SMALL) as running:
        answers = running.run(*(ask(case["prompt"], score_from=1, num_logprobs=5) for case in cases))
    for case, answer in zip(cases, answers):
        assert answer.tokens == case["greedy"]
        np.testing.assert_allclose(
            [entry.logprob for entry in answer.prompt_logprobs], case["prompt_logprobs"][1:], atol=1e-3
        )
        np.testing.assert_allclose(
            [entry.logprob for entry in answer.logprobs], case["greedy_logprobs"], atol=1e-3
        )
        best, logprob = answer.logprobs[0].top[0]
        assert best == case["last_top5"][0][0] and logprob == pytest.approx(case["last_top5"][0][1], abs=1e-3)
        assert answer.finish is FinishReason.LENGTH


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prompts_that_share_prefill_programs_in_short_rows_match_their_references(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("levserve.models.describe.plan_sizes", in_short_rows)
    cases = cases_of(family)
    with running_engine(GOLDEN / family) as running:
        answers = running.run(*(ask(case["prompt"], num_logprobs=0, score_from=1) for case in cases))
    for case, answer in zip(cases, answers):
        assert answer.tokens == case["greedy"]
        np.testing.assert_allclose(
            [entry.logprob for entry in answer.logprobs], case["greedy_logprobs"], atol=1e-3
        )
        assert len(answer.prompt_logprobs) == len(case["prompt"]) - 1


def test_where_rows_are_computed_in_their_order_the_longest_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[list[int]] = []

    def read_rows(in_flight: InFlightRound) -> list[Sampled]:
        computed.append([row.position for group, _ in in_flight.rows for row in group])
        return as_ever(in_flight)

    as_ever = InFlightRound.read_rows
    monkeypatch.setattr("levserve.models.describe.plan_sizes", in_short_rows)
    monkeypatch.setattr(InFlightRound, "read_rows", read_rows)
    prompts = [[5, 6, 7], [*range(10, 40)], [8], [*range(20, 36)]]
    with running_engine(GOLDEN / "llama") as running:
        together = running.run(*(ask(prompt) for prompt in prompts))
        alone = [running.run(ask(prompt))[0] for prompt in prompts]
    assert any(len(positions) == len(prompts) for positions in computed)
    assert all(positions == sorted(positions, reverse=True) for positions in computed)
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]


def test_a_first_token_does_not_wait_for_the_rows_of_its_round(
    llama: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, read_rows = threading.Event(), InFlightRound.read_rows

    def late(in_flight: InFlightRound) -> list[Sampled]:
        ends_prompt = any(chunk.is_last for chunk in in_flight.plan.chunks)
        assert not (ends_prompt and in_flight.plan.rows) or may_read.wait(60)
        return read_rows(in_flight)

    monkeypatch.setattr(InFlightRound, "read_rows", late)
    running = llama.submit(ask([5, 6, 7], 100))
    running.get(timeout_seconds=60)
    newcomer = llama.submit(ask([8, 9], 4))
    _, batch = newcomer.get(timeout_seconds=60)
    assert len(batch.tokens) == 1 and not may_read.is_set()
    may_read.set()
    assert len(read(newcomer)[0].tokens) == 3 and read(running)[0].finish is FinishReason.LENGTH


def test_chunks_are_waited_for_where_no_prompt_ends_too() -> None:
    """Otherwise decoding would seem to take as long as both, and the next chunk could be larger."""
    waited: list[str] = []
    output = SimpleNamespace(block_until_ready=lambda: waited.append("for the chunk"))
    request = ask([1, 2, 3])
    chunk = Chunk(Sequence(request, list(request.prompt)), slot=0, start=0, count=2, is_last=False)
    plan = RoundPlan((chunk,), (), (), ())
    rows = [PrefillRow(chunk, ChunkOutput(output), 0)]  # type: ignore[arg-type]
    (sampled,) = InFlightRound(plan, [rows], []).read_chunks()
    assert waited == ["for the chunk"] and sampled.tokens == ()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Programs, Shape]]:
    """Which programs have run, and whose they are: an engine that other tests share may still be compiling, and runs each
    new program once."""
    found: list[tuple[Programs, Shape]] = []
    take = Programs.__getitem__

    def note(programs: Programs, shape: Shape) -> Any:
        found.append((programs, shape))
        return take(programs, shape)

    monkeypatch.setattr(Programs, "__getitem__", note)
    return found


def test_a_prompt_that_would_leave_a_large_program_mostly_empty_takes_small_ones(
    runs: list[tuple[Programs, Shape]],
) -> None:
    with running_engine(GOLDEN / "llama", *LARGE_CHUNKS) as running:
        programs = running.loaded.runner.programs
        prefills = [shape for shape in programs.all_shapes if shape.is_prefill and not shape.is_sample_only]
        programs.compile_only([*prefills, Shape(programs.first_shapes[-1].size, Mode.FULL)])
        wait_until(lambda: not programs.has_cold, COMPILE_SECONDS)
        running.run(ask([1], 1))  # so the first run of the last program is over
        for length, sizes in ((40, [16, 16, 8]), (100, [128])):
            runs.clear()
            running.run(ask([length] * length, 1))
            assert [shape.size for owner, shape in runs if owner is programs and shape.is_prefill] == sizes


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_prompts_of_which_only_the_next_token_is_wanted_get_it_from_sample_only_programs(
    family: str, monkeypatch: pytest.MonkeyPatch, runs: list[tuple[Programs, Shape]]
) -> None:
    def as_on_a_gpu(*args: Any, **given: Any) -> Sizes:
        return replace(in_short_rows(*args, **given), row_sizes=(4,), has_all_modes=True)

    monkeypatch.setattr("levserve.models.describe.plan_sizes", as_on_a_gpu)
    cases = cases_of(family)
    with running_engine(GOLDEN / family, compiles_all=True) as running:
        running.wait_compiled()
        runs.clear()
        answers = running.run(*(ask(case["prompt"]) for case in cases))
        drawn = running.run(
            *(
                ask(case["prompt"], temperature=0.7, seed=5, top_p=top_p)
                for case in cases
                for top_p in (1.0, 0.9)
            )
        )
        programs = running.loaded.runner.programs
        sample_only = {shape for owner, shape in runs if owner is programs and shape.is_prefill}
        runs.clear()
        running.loaded.scheduler.forget_prefixes()
        both = [(case["prompt"], top_p) for case in cases for top_p in (1.0, 0.9)]
        told = running.run(
            *(ask(prompt, temperature=0.7, seed=5, top_p=top_p, num_logprobs=1) for prompt, top_p in both)
        )
    assert [answer.tokens for answer in answers] == [case["greedy"] for case in cases]
    assert [answer.tokens for answer in drawn] == [answer.tokens for answer in told]
    assert sample_only and all(shape.is_sample_only for shape in sample_only)
    full = {shape for owner, shape in runs if owner is programs and not shape.is_sample_only}
    assert any(shape.is_prefill for shape in full), "for more than the token there are the others"


@pytest.mark.parametrize("length", [3, 8, 9])
def test_choices_of_one_prompt_prefill_it_once_and_draw_as_they_would_alone(
    llama: Running, length: int
) -> None:
    prompt = [40 + length, *range(60, 59 + length)]
    first = ask(prompt, 12, temperature=0.8, seed=1)
    forked = [
        ask(prompt, 12, temperature=0.8, seed=seed, shares_prompt_of=first.request_id, presence_penalty=1.0)
        for seed in (2, 3, 4)
    ]
    before = llama.metric("prefill_tokens_total")
    _, *got = llama.run(first, *forked)
    assert llama.metric("prefill_tokens_total") - before == length
    alone = [llama.run(replace(request, shares_prompt_of=None))[0] for request in forked]
    assert [answer.tokens for answer in got] == [answer.tokens for answer in alone]
    assert len({tuple(answer.tokens) for answer in got}) == 3


def test_several_steps_a_round_give_the_same_tokens() -> None:
    cases = cases_of("llama")
    flags = ("--round-steps", "4", "--prefill-chunk", "16", "--page-size", "8")
    with running_engine(GOLDEN / "llama", *flags) as running:
        requests = [ask(case["prompt"], 22, repetition_penalty=1.0, num_logprobs=0) for case in cases]
        for case, answer in zip(cases, running.run(*requests)):
            assert answer.tokens == case["greedy"][:22]
        (stopped,) = running.run(ask(cases[1]["prompt"], stop_ids=[cases[1]["greedy"][5]]))
    assert stopped.tokens == cases[1]["greedy"][:5] and stopped.finish is FinishReason.STOP


def test_a_seed_gives_the_same_text_alone_and_among_fifteen_others_in_any_slot(llama: Running) -> None:
    seeded = dict(temperature=1.0, seed=1234)
    (alone,) = llama.run(ask([5, 6, 7], 40, **seeded))
    for place in (0, 7, 15):
        crowd = [ask(request.prompt, 24, temperature=0.9, top_k=3) for request in CROWD]
        crowd.insert(place, ask([5, 6, 7], 40, **seeded))
        answers = llama.run(*crowd)
        assert answers[place].tokens == alone.tokens
    assert llama.metric("batch_rows_sum") > llama.metric("batch_rows_count"), "nothing was batched"


def test_a_seed_gives_the_same_text_after_a_preemption(llama: Running) -> None:
    prompts = [[number, 9, 9] for number in range(3, 9)]
    wanted = [
        llama.run(ask(prompt, 60, temperature=1.0, seed=number))[0].tokens
        for number, prompt in enumerate(prompts)
    ]
    with running_engine(GOLDEN / "llama", *CROWDED, rows=8) as small:
        answers = small.run(
            *(ask(prompt, 60, temperature=1.0, seed=number) for number, prompt in enumerate(prompts))
        )
        assert small.metric("preemptions_total") > 0
    assert [answer.tokens for answer in answers] == wanted


def test_different_seeds_give_different_text(llama: Running) -> None:
    one, other = llama.run(ask([5, 6], temperature=1.0, seed=1), ask([5, 6], temperature=1.0, seed=2))
    assert one.tokens != other.tokens


def test_a_prompt_seen_before_is_not_computed_again(llama: Running) -> None:
    prompt = list(range(50, 90))
    (first,) = llama.run(ask(prompt, 4))
    before = llama.metric("prefill_tokens_total")
    (second,) = llama.run(ask(prompt, 4))
    assert second.tokens == first.tokens
    assert (
        llama.metric("prefill_tokens_total") - before == 4
    )  # the last page: at least one token must be computed


@pytest.mark.parametrize("case", cases_of("llama"), ids=lambda case: f"{len(case['prompt'])} tokens")
def test_a_prompt_is_scored_as_the_reference_scores_it(llama: Running, case: dict[str, Any]) -> None:
    echoed, scored = llama.run(
        ask(case["prompt"], 3, score_from=1, num_logprobs=1),
        ask(case["prompt"], 0, score_from=1, num_logprobs=1),
    )
    assert echoed.tokens == case["greedy"][:3] and scored.tokens == []
    assert scored.finish is FinishReason.LENGTH
    for answer in (echoed, scored):
        got = [entry.logprob for entry in answer.prompt_logprobs]
        np.testing.assert_allclose(got, case["prompt_logprobs"][1:], atol=1e-3)
        for token, entry in zip(case["prompt"][1:], answer.prompt_logprobs):
            best, value = entry.top[0]
            assert (value == entry.logprob) if best == token else (value > entry.logprob)


def test_a_scored_continuation_reuses_its_context(llama: Running) -> None:
    context, ending = list(range(60, 100)), [3, 4, 5]
    (whole,) = llama.run(ask([*context, *ending], 0, score_from=1, num_logprobs=0))
    before = llama.metric("prefill_tokens_total")
    (only,) = llama.run(ask([*context, *ending], 0, score_from=len(context), num_logprobs=0))
    assert (
        llama.metric("prefill_tokens_total") - before == 4 + 3
    )  # computed from the page that holds the context's last token
    np.testing.assert_allclose(
        [entry.logprob for entry in only.prompt_logprobs],
        [entry.logprob for entry in whole.prompt_logprobs[-3:]],
        atol=1e-5,
    )


def test_hidden_states_are_pooled_over_all_chunks(llama: Running) -> None:
    prompt = [number % 90 + 3 for number in range(75)]  # three chunks
    model = llama.loaded.runner._leaves
    skeleton = llama.loaded.runner.programs._skeleton.model(model)
    pools = cache.make_pool(skeleton.config, 20, 4, jnp.dtype(jnp.float32))
    tokens, table, places = (np.asarray([each], np.int32) for each in (prompt, range(20), range(75)))
    hidden, _ = jax.jit(lambda model, *given: model(*given))(skeleton, tokens, pools, table, places)
    states = np.asarray(hidden.array)[0]
    (answer,) = llama.run(ask(prompt, 0, wants_hidden=True))
    assert answer.hidden is not None
    np.testing.assert_allclose(answer.hidden.mean, states.mean(0), atol=1e-4)
    np.testing.assert_allclose(answer.hidden.last, states[-1], atol=1e-4)


def test_a_cancelled_request_returns_its_pages(llama: Running) -> None:
    stream = llama.submit(ask([1, 2, 3], 200))
    stream.get(timeout_seconds=20)
    stream.close()
    (rest,) = read(stream)
    assert rest.finish is FinishReason.CANCELLED
    llama.wait_idle()
    assert llama.metric("kv_pages_used") == 0


def test_a_request_past_its_deadline_ends_with_what_it_has(llama: Running) -> None:
    never, some = llama.run(
        ask([1], 200, deadline=time.monotonic() - 1), ask([2], 250, deadline=time.monotonic() + 0.15)
    )
    assert never.finish is FinishReason.DEADLINE and never.tokens == []
    assert some.finish is FinishReason.DEADLINE and 0 < len(some.tokens) < 250


def test_stop_tokens_wait_for_min_tokens(llama: Running) -> None:
    (free,) = llama.run(ask([275], 24))
    stop = free.tokens[3]
    (stopped,) = llama.run(ask([275], 24, stop_ids=[stop]))
    (later,) = llama.run(ask([275], 24, stop_ids=[stop], min_tokens=10))
    assert stopped.tokens == free.tokens[: free.tokens.index(stop)]
    assert len(later.tokens) >= 10 and stop not in later.tokens


def test_a_bias_forces_and_forbids_tokens(llama: Running) -> None:
    (free,) = llama.run(ask([275], 8))
    forced, without = llama.run(
        ask([275], 8, logit_bias=((17, 100.0),)), ask([275], 8, logit_bias=((free.tokens[0], -100.0),))
    )
    assert forced.tokens == [17] * 8
    assert free.tokens[0] not in without.tokens


def test_penalties_drive_repetition_out(llama: Running) -> None:
    (free,) = llama.run(ask([275], 40))
    assert len(set(free.tokens)) < 40, "the free text repeats itself"
    answers = llama.run(
        *(
            ask([275], 40, **{name: value})
            for name, value in (
                ("frequency_penalty", 50.0),
                ("presence_penalty", 50.0),
                ("repetition_penalty", 50.0),
            )
        )
    )
    for answer in answers:
        assert len(set(answer.tokens)) == 40


def test_a_penalty_remembers_after_a_preemption_and_a_new_slot(llama: Running) -> None:
    wanted = llama.run(*(ask([number], 60, frequency_penalty=2.0) for number in range(20, 26)))
    with running_engine(GOLDEN / "llama", *CROWDED, rows=8) as small:
        answers = small.run(*(ask([number], 60, frequency_penalty=2.0) for number in range(20, 26)))
        assert small.metric("preemptions_total") > 0
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]


def test_no_request_waits_for_a_compile_after_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        code_cache, "current", code_cache.CodeCache()
    )  # other engines of this process use one
    compiled_on: list[str] = []

    def note(event: str, _: float, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled_on.append(threading.current_thread().name)

    # Sizes that no other test has: jax remembers what it compiled in this process.
    flags = (*SMALL, "--kv-pages", "260", "--compile-cache", "false")
    with running_engine(GOLDEN / "llama", *flags, compiles_all=True) as running:
        assert not running.loaded.runner.programs.is_complete, "some shapes are left for the background"
        jax.monitoring.register_event_duration_secs_listener(note)
        deadline = time.monotonic() + COMPILE_SECONDS
        try:
            while not running.loaded.runner.programs.is_complete:
                assert time.monotonic() < deadline
                run_mixed_load(running)
            run_mixed_load(running)
        finally:
            jax.monitoring.unregister_event_duration_listener(note)
    assert "levserve-device" not in compiled_on, "the device thread compiled something"
    assert "levserve-compile" in compiled_on, "the rest is compiled in the background"


@pytest.mark.parametrize(
    ("num_tokens", "flags", "size"),
    [
        (64, {}, 64),
        (65, {}, 128),
        (2560, {}, 4096),
        (2560, {"can_split": True}, 1024),  # 4096 would be mostly empty
        (3000, {"can_split": True}, 4096),
        (9000, {"can_split": True}, 4096),
        (10, {"can_split": True}, 64),
        (10, {"is_sample_only": True}, 64),
    ],
)
def test_tokens_of_prompts_get_the_program_that_they_fill(
    num_tokens: int, flags: dict[str, bool], size: int
) -> None:
    programs = Programs.__new__(Programs)
    shapes = [
        *map(Shape, (64, 128, 1024, 4096)),
        *(Shape(size, is_sample_only=True) for size in (64, 128, 4096)),
        Shape(8, Mode.FULL),
    ]
    programs._ready = dict.fromkeys(shapes, lambda *given: given)
    assert programs.prefill(num_tokens, **flags) == Shape(
        size, is_sample_only=flags.get("is_sample_only", False)
    )


def test_running_streams_wait_no_longer_for_a_prompt_than_they_were_promised() -> None:
    flags = (*LARGE_CHUNKS, "--inter-token-goal-ms", "1")
    with running_engine(GOLDEN / "llama", *flags, compiles_all=True) as running:
        plans = []
        plan = running.loaded.scheduler.plan

        def note(max_prefill: int | None = None) -> Any:
            plans.append(plan(max_prefill))
            return plans[-1]

        running.loaded.scheduler.plan = note  # type: ignore[method-assign]
        first = running.submit(ask([5, 6, 7], 100))
        first.get(60)
        read(running.submit(ask([number % 90 + 3 for number in range(100)], 2)))
        read(first)
    beside = [made.num_prefill for made in plans if made.rows and made.chunks]
    assert sum(beside) >= 96 and max(beside) <= 32, "never more than the smallest program"


def test_work_larger_than_any_ready_program_is_done_in_parts(llama: Running) -> None:
    prompt = [number % 90 + 3 for number in range(75)]
    decoded = [([100 + number, 7], 12) for number in range(9)]
    with running_engine(GOLDEN / "llama", *LLAMA, rows=ROWS) as small:
        *got, scored = small.run(
            *(ask(*given) for given in decoded), ask(prompt, 2, score_from=1, num_logprobs=1)
        )
    *wanted, reference = llama.run(
        *(ask(*given) for given in decoded), ask(prompt, 2, score_from=1, num_logprobs=1)
    )
    assert [answer.tokens for answer in got] == [answer.tokens for answer in wanted]
    assert scored.tokens == reference.tokens and len(scored.prompt_logprobs) == 74
    np.testing.assert_allclose(
        [entry.logprob for entry in scored.prompt_logprobs],
        [entry.logprob for entry in reference.prompt_logprobs],
        atol=1e-4,
    )


def run_mixed_load(running: Running) -> None:
    """Prompts and batches of many sizes, with and without every kind of rule."""
    for length in (1, 17, 60, 150):
        mixed = [
            ask(
                [number + 3] * length,
                6,
                temperature=number % 2,
                top_p=0.5 + number / 20,
                num_logprobs=number % 3 or None,
            )
            for number in range(8)
        ]
        running.run(*mixed[: 1 + length % 8], ask([1] * length, 3, logit_bias=((5, 1.0),)))
        running.run(ask([2] * length, 5), ask([3] * length, 5, temperature=1.0))


def test_a_failing_round_ends_every_stream() -> None:
    with running_engine(GOLDEN / "llama", *SMALL) as running:

        def explode(plan: object, *, may_mix: bool) -> None:
            raise RuntimeError("the device is gone")

        running.loaded.runner.dispatch = explode  # type: ignore[method-assign,assignment]
        answers = running.run(ask([1], 5), ask([2], 5))
        assert [answer.finish for answer in answers] == [FinishReason.FAILED] * 2
    assert [str(failure) for failure in running.failures] == ["the device is gone"]


def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    with running_engine(GOLDEN / "llama", *SMALL) as running:
        stream = running.submit(ask([1, 2], 30))
        stream.get(timeout_seconds=20)
        running.engine.begin_drain(time.monotonic() + 30)
        with pytest.raises(Exception, match="shutting down"):
            running.submit(ask([3], 5))
        (answer,) = read(stream)
        assert answer.finish is FinishReason.LENGTH


def test_a_drain_past_its_deadline_ends_the_rest() -> None:
    with running_engine(GOLDEN / "llama", *SMALL) as running:
        stream = running.submit(ask([1, 2], 250))
        stream.get(timeout_seconds=20)
        running.engine.begin_drain(time.monotonic())
        (answer,) = read(stream)
        assert answer.finish is FinishReason.SHUTDOWN and len(answer.tokens) < 250
