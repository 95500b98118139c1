"""Scoring continuations: their sums, their tokens, and where a text is split into prompt and continuation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from levserve.errors import BadRequest
from levserve.request.pairs import Pair, split_pair
from levserve.text.tokenizer import Tokenizer
from levserve.text.vocabulary import Vocabulary
from tests.fake_app import App, serving

PATH = "/loglikelihood"


@pytest.fixture
def app() -> Iterator[App]:
    with serving(max_running=3) as app:
        yield app


def pairs(prompts: Any, continuations: Any, **fields: Any) -> dict[str, Any]:
    return {"prompts": prompts, "continuations": continuations} | fields


def test_gives_the_sum_for_each_pair_in_their_order(app: App) -> None:
    reply = app.post(PATH, pairs(["t17", "t17 t18", "t30"], [" t18 t19", " t20", " t29"]))
    assert reply.json == {"ll": [-1.0, -1.5, -9999.0]}


def test_gives_each_token_and_whether_it_was_the_likeliest_when_asked(app: App) -> None:
    reply = app.post(PATH, pairs(["t17", "t17"], [" t18 t19", " t18 t20"], details=True))
    assert reply.json == {
        "ll": [-1.0, -2.0],
        "is_greedy": [True, False],
        "tokens": [["t18", "t19"], ["t18", "t20"]],
        "token_logprobs": [[-0.5, -0.5], [-0.5, -1.5]],
    }


def test_generates_nothing_and_scores_the_continuation_only(app: App) -> None:
    app.post(PATH, pairs(["t17 t18"], [" t19 t20"]))
    (request,) = app.device.requests
    assert (request.prompt, request.score_from, request.max_tokens, request.sampling.num_logprobs) == (
        (17, 18, 19, 20),
        2,
        0,
        0,
    )


def test_many_pairs_are_computed_as_rows_become_free(app: App) -> None:
    reply = app.post(PATH, pairs(["t17"] * 50, [f" t{number}" for number in range(18, 68)]))
    assert reply.json == {"ll": [-0.5, -1.5, *[-9999.0] * 48]}
    assert len({request.request_id for request in app.device.requests}) == 50


def test_an_empty_prompt_is_the_bos_token(app: App) -> None:
    reply = app.post(PATH, pairs(["", "  "], ["</s> t3", "</s> t3"]))
    assert reply.json == {"ll": [-1.0, -1.0]}  # in the vocabulary, <s> is followed by </s> and t3


@pytest.mark.parametrize(
    "body, status, param",
    [
        ({}, 400, "prompts"),
        ({"prompts": ["t17"]}, 400, "continuations"),
        (pairs([], []), 400, "continuations"),
        (pairs(["t17"], []), 400, "continuations"),
        (pairs(["t17"], [" t18", " t19"]), 400, "continuations"),
        (pairs("t17", [" t18"]), 400, "prompts"),
        (pairs(["t17"], [18]), 400, "continuations[0]"),
        (pairs(["t17"] * 2049, [" t18"] * 2049), 400, "continuations"),
        (pairs(["t17", "t17"], [" t18", ""]), 400, "continuations[1]"),
        (pairs(["t17 "], [" "]), 400, "continuations[0]"),
        (pairs(["t17 " * 64], [" t18"]), 400, "prompts[0]"),
        (pairs(["t17"], [" t18"], model="other"), 404, "model"),
        (pairs(["t17"], [" t18"], details="yes"), 400, "details"),
        (pairs(["\ud800"], [" t18"]), 400, None),
        ([], 400, None),
    ],
)
def test_a_mistake_names_its_field(app: App, body: Any, status: int, param: str | None) -> None:
    assert app.refuse(PATH, body) == (status, param)
    assert app.device.requests == []


def test_the_context_may_be_filled_to_the_last_token(app: App) -> None:
    assert app.post(PATH, pairs(["t17 " * 63], [" t18"])).json == {"ll": [-0.5]}


def test_a_model_name_may_be_given(app: App) -> None:
    assert app.post(PATH, pairs(["t17"], [" t18"], model="toy")).status_code == 200


def test_time_that_runs_out_is_an_error_and_not_half_a_sum() -> None:
    with serving(request_timeout=0.05) as app:
        assert app.refuse(PATH, pairs(["t4", "t17"], [" t18", " t18"])) == (504, None)


def make_tokenizer(*, bos: str | None) -> Tokenizer:
    """A tokenizer that keeps spaces at the front of words, as most do; " ab" and "ab" are single tokens."""
    vocabulary = {
        token: number for number, token in enumerate(["a", "b", "c", "Ġ", "ab", "Ġab", "Ġa", "<s>"])
    }
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b"), ("Ġ", "ab"), ("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 7)])
    return Tokenizer(Vocabulary(backend, bos_token=bos))


@pytest.mark.parametrize(
    "prompt, continuation, pair",
    [
        ("c", " ab", Pair([7, 2, 5], 2)),
        ("c ", "ab", Pair([7, 2, 5], 2)),  # the space moves to the continuation, with which it is one token
        ("c", "ab", Pair([7, 2, 4], 2)),
        # Joined, "ab" is one token; the prompt keeps as many tokens as it has alone.
        (
            "a",
            "bc",
            Pair([7, 4, 2], 2),
        ),
        ("", " ab", Pair([7, 5], 1)),
        ("  ", "ab", Pair([7, 3, 5], 1)),
    ],
)
def test_a_pair_is_split_as_lm_evaluation_harness_splits_it(
    prompt: str, continuation: str, pair: Pair
) -> None:
    assert split_pair(prompt, continuation, make_tokenizer(bos="<s>")) == pair


def test_an_empty_prompt_is_refused_where_there_is_no_bos_token() -> None:
    with pytest.raises(BadRequest, match="bos token"):
        split_pair("", "ab", make_tokenizer(bos=None))
    assert split_pair("c", "ab", make_tokenizer(bos=None)) == Pair([2, 4], 1)
