"""An engine with a draft model writes the text that it writes without one.

A model that drafts for itself must always be right: a wrong draft token shows that the draft model's keys
and values are not those of the text. A model that is cut off after its first layer is right now and then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from levserve.errors import ConfigError
from levserve.models.load import load
from levserve.observe.metrics import Metrics
from levserve.schedule.request import FinishReason
from levserve.settings.parse import parse_settings
from tests.conftest import GOLDEN
from tests.engines import Answer, Running, ask, cache_folder, running_engine
from tests.tiny.test_constrained_text import PROMPTS, RULE, one_at_a_time
from tests.tiny.test_engine import cases_of
from tests.tiny.test_speculated_text import FEW, LOOP, RULES, Switch, run_without

SMALL = ("--page-size", "4", "--kv-pages", "40", "--prefill-chunk", "8")


@contextmanager
def drafting(folder: Path, draft: Path, *flags: str) -> Iterator[Running]:
    """Runs an engine of two rows whose draft model drafts whenever it may."""
    with running_engine(
        folder, "--draft-model", str(draft), *SMALL, *flags, rows=2, compiles_all=True
    ) as running:
        running.wait_compiled()
        sizes = running.loaded.sizes
        running.loaded.scheduler.speculation = Switch(sizes.num_draft, sizes.draft_turns)
        yield running
        running.wait_idle()
        assert running.metric("kv_pages_used") == 0
        running.loaded.scheduler.check()


def make_variant(source: Path, target: Path, **changes: object) -> Path:
    """Copies a model with another config, and only the weights that it needs."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    layers = tuple(f"model.layers.{number}." for number in range(int(config["num_hidden_layers"])))
    kept = {
        name: array
        for name, array in weights.items()
        if not name.startswith("model.layers.") or name.startswith(layers)
    }
    save_file(kept, target / "model.safetensors")
    return target


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that drafts for itself, twice in a round."""
    folder = Path(shutil.copytree(GOLDEN / "llama", tmp_path_factory.mktemp("served") / "llama"))
    with drafting(folder, folder, "--round-steps", "8") as running:
        assert running.loaded.sizes.draft_turns == 2
        yield running


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose first layer drafts for it."""
    draft = make_variant(
        GOLDEN / "mistral", tmp_path_factory.mktemp("draft") / "first-layer", num_hidden_layers=1
    )
    with drafting(GOLDEN / "mistral", draft, "--speculate", "3") as running:
        yield running


def counts(running: Running) -> tuple[float, float]:
    return running.metric("draft_tokens_total"), running.metric("draft_accepted_tokens_total")


@contextmanager
def all_right(running: Running) -> Iterator[None]:
    """Checks that tokens are drafted inside, and that the model would have sampled every one of them."""
    before = counts(running)
    yield
    running.wait_idle()
    drafted, right = (after - old for after, old in zip(counts(running), before))
    assert 0 < drafted == right


@contextmanager
def some_right(running: Running) -> Iterator[None]:
    before = counts(running)
    yield
    running.wait_idle()
    drafted, right = (after - old for after, old in zip(counts(running), before))
    assert 0 < right < drafted


def same(answers: list[Answer], wanted: list[Answer]) -> None:
    for answer, plain in zip(answers, wanted, strict=True):
        assert answer.tokens == plain.tokens and answer.finish is plain.finish
        np.testing.assert_allclose(
            [one.logprob for one in answer.logprobs], [one.logprob for one in plain.logprobs], atol=1e-4
        )


def test_a_model_that_drafts_for_itself_is_always_right_and_says_what_the_reference_says(
    twin: Running,
) -> None:
    cases = cases_of("llama")
    with all_right(twin):
        answers = twin.run(*(ask(case["prompt"], num_logprobs=0) for case in cases))
    for case, answer in zip(cases, answers):
        assert answer.tokens == case["greedy"]
        np.testing.assert_allclose(
            [entry.logprob for entry in answer.logprobs], case["greedy_logprobs"], atol=1e-3
        )


@pytest.mark.parametrize("rules", RULES)
def test_a_draft_is_drawn_by_the_rules_of_its_request(twin: Running, rules: str) -> None:
    requests = [ask(prompt, 30, **RULES[rules]) for prompt in (LOOP, [40, 41, 40], [9] * 7)]
    with all_right(twin):
        together = twin.run(*requests)
    same(together, run_without(twin, *requests))


@pytest.mark.parametrize("rules", RULES)
def test_a_text_is_the_same_with_a_draft_model_alone_and_in_company(cut: Running, rules: str) -> None:
    requests = [ask(prompt, 48, **RULES[rules]) for prompt in (LOOP, [40, 41, 40], [9] * 7)]
    with some_right(cut):
        together = cut.run(*requests)
        (alone,) = cut.run(replace(requests[0], request_id=f"alone-{rules}"))
    wanted = run_without(cut, *requests)
    same([*together, alone], [*wanted, wanted[0]])


def test_limits_and_stop_tokens_cut_drafts_where_they_would_cut_steps(cut: Running) -> None:
    (whole,) = run_without(cut, ask(LOOP, 30, seed=5, **FEW))
    for limit in range(1, 30, 4):
        (answer,) = cut.run(ask(LOOP, limit, seed=5, **FEW))
        assert answer.tokens == whole.tokens[:limit] and answer.finish is FinishReason.LENGTH
    for token in dict.fromkeys(whole.tokens):
        (answer,) = cut.run(ask(LOOP, 30, stop_ids=[token], seed=5, **FEW))
        assert answer.tokens == whole.tokens[: whole.tokens.index(token)]
        assert answer.finish is FinishReason.STOP


def test_tokens_decoded_without_drafts_are_shown_to_the_draft_model(twin: Running) -> None:
    switch = twin.loaded.scheduler.speculation
    assert isinstance(switch, Switch)
    request = ask([50, 51, 52], 60)
    (wanted,) = run_without(twin, request)
    with all_right(twin):
        switch.is_on = False
        stream = twin.submit(request)
        tokens: list[int] = []
        while len(tokens) < 20:
            tokens += stream.get(timeout_seconds=60)[1].tokens
        switch.is_on = True
        while not stream.is_finished:
            tokens += stream.get(timeout_seconds=60)[1].tokens
    assert tokens == wanted.tokens


def test_pages_of_a_text_without_drafts_are_found_again_and_drafted_after(twin: Running) -> None:
    prompt = [70, 71, *LOOP]
    (first,) = run_without(twin, ask(prompt, 30, seed=3, **FEW))
    before = twin.metric("prefix_hit_tokens_total")
    again = ask([*prompt, *first.tokens], 30)
    with all_right(twin):
        found = twin.run(again)
    assert twin.metric("prefix_hit_tokens_total") - before >= len(prompt) + 20
    same(found, run_without(twin, again))


def test_a_preemption_among_drafts_loses_nothing(twin: Running, cut: Running) -> None:
    for running, expected in ((twin, all_right), (cut, some_right)):
        requests = [
            ask([number, *LOOP], 90, seed=number, **FEW) for number in range(20, 23)
        ]  # 27 of 40 pages each
        before = running.metric("preemptions_total")
        with expected(running):
            answers = running.run(*requests)
        assert running.metric("preemptions_total") > before
        same(answers, [run_without(running, request)[0] for request in requests])


def test_choices_share_their_prompt_and_its_drafts(twin: Running) -> None:
    first = ask(range(60, 69), 20, temperature=0.8, seed=1)
    second = ask(first.prompt, 20, temperature=0.8, seed=2, shares_prompt_of=first.request_id)
    before = twin.metric("prefill_tokens_total")
    with all_right(twin):
        got = twin.run(first, second)
    assert twin.metric("prefill_tokens_total") - before == len(first.prompt)
    same(got, run_without(twin, first, replace(second, shares_prompt_of=None)))


@pytest.mark.parametrize("rules", [{}, {"temperature": 1.0, "seed": 5}])
def test_constrained_text_is_that_of_single_masked_draws(
    twin: Running, cut: Running, rules: dict[str, float]
) -> None:
    for running in (twin, cut):
        request = ask(PROMPTS[0], 20, constraint=RULE, **rules)
        answer, beside = running.run(request, free := ask(LOOP, 20))
        assert answer.tokens == one_at_a_time(running, request)
        same([beside], run_without(running, free))


def test_reloaded_weights_leave_the_draft_model_as_it_is(twin: Running) -> None:
    request = ask(LOOP, 20, num_logprobs=0)
    file = Path(twin.loaded.description.files.path) / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file(weights | {name: np.ascontiguousarray(np.roll(weights[name], 3, axis=1))}, file)
    twin.registry.reload()
    before = counts(twin)
    changed = twin.run(request)
    twin.wait_idle()
    drafted, right = (after - old for after, old in zip(counts(twin), before))
    assert right < drafted, "it drafts what the old weights say"
    same(changed, run_without(twin, request))
    save_file(weights, file)
    twin.registry.reload()
    with all_right(twin):
        restored = twin.run(replace(request, request_id="restored"))
    assert restored[0].tokens != changed[0].tokens


def test_devices_that_share_a_model_share_its_draft_model() -> None:
    with drafting(GOLDEN / "llama", GOLDEN / "llama", "--tensor-parallel", "2") as running:
        cases = cases_of("llama")
        with all_right(running):
            answers = running.run(*(ask(case["prompt"]) for case in cases))
        assert [answer.tokens for answer in answers] == [case["greedy"] for case in cases]


def refusal(draft: Path | str, *flags: str, model: Path = GOLDEN / "llama") -> str:
    given = ["--model", str(model), "--draft-model", str(draft), "--cache-dir", str(cache_folder()), *flags]
    with pytest.raises(ConfigError) as caught:
        load(parse_settings([*given, "--max-running", "2"], {}), Metrics(), report=lambda _: None)
    return str(caught.value)


def test_a_draft_model_that_cannot_draft_is_refused_by_name(tmp_path: Path) -> None:
    assert "does not exist" in refusal("/nowhere/at-all/model")
    assert "an HRM brain cannot draft" in refusal(GOLDEN / "hrm-tiny-moe")
    assert "does not apply to" in refusal(GOLDEN / "llama", model=GOLDEN / "hrm-tiny-moe")
    wide = make_variant(GOLDEN / "llama", tmp_path / "wide", vocab_size=385)
    assert "its vocabulary has 385 rows, and the model's has 384" in refusal(wide)
    first = make_variant(GOLDEN / "llama", tmp_path / "first", num_hidden_layers=1)
    assert "parameters, which is more than the model's" in refusal(GOLDEN / "llama", model=first)
    tokenizer = json.loads((GOLDEN / "llama" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[100:102]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (first / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "its tokenizer is not the model's: token 1" in refusal(first)
