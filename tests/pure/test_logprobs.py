"""Log-probabilities as clients read them: numbers that JSON can hold, tokens that may share a text, ranks."""

from __future__ import annotations

import json
import math
from typing import cast

import msgspec
import pytest

from levserve.answers.logprobs import chat_logprobs, clamp, prompt_logprobs, text_logprobs
from levserve.generation import Delta
from levserve.schedule.request import TokenLogprob
from levserve.text.tokenizer import Tokenizer


class Bytes:
    """Token k is byte k, so tokens from 128 on are parts of characters and have the same text."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


BYTES = cast(Tokenizer, Bytes())


@pytest.mark.parametrize(
    "value, told", [(-0.5, -0.5), (0.0, 0.0), (-math.inf, -9999.0), (math.nan, -9999.0), (-1e30, -9999.0)]
)
def test_a_number_that_json_lacks_is_very_unlikely(value: float, told: float) -> None:
    assert clamp(value) == told


@pytest.mark.parametrize("top", [((128, -0.1), (129, -3.0)), ((129, -3.0), (128, -0.1))])
@pytest.mark.parametrize("token, logprob", [(128, -0.1), (129, -3.0), (130, -7.0)])
def test_of_tokens_that_show_alike_the_likeliest_stays(
    token: int, logprob: float, top: tuple[tuple[int, float], ...]
) -> None:
    shown = text_logprobs(Delta("", (token,), (TokenLogprob(logprob, top),), offsets=(0,)), BYTES)
    assert shown is not None
    assert (shown.top_logprobs, shown.token_logprobs) == ([{"\ufffd": -0.1}], [logprob])


def test_the_chosen_token_is_among_the_likely_ones_with_the_very_same_number() -> None:
    value = -0.12345678901234567
    shown = text_logprobs(Delta("", (65,), (TokenLogprob(value, ((66, value * 2),)),), offsets=(0,)), BYTES)
    read = json.loads(msgspec.json.encode(shown))
    assert read["top_logprobs"][0]["A"] == read["token_logprobs"][0] == value


def test_a_chat_token_has_its_own_bytes() -> None:
    shown = chat_logprobs(Delta("", (195,), (TokenLogprob(-0.5, ((195, -0.5), (66, -math.inf))),)), BYTES)
    assert shown is not None
    (chosen,) = shown.content
    assert (chosen.token, chosen.bytes) == ("\ufffd", [195])
    assert [(one.token, one.logprob, one.bytes) for one in chosen.top_logprobs] == [
        ("\ufffd", -0.5, [195]),
        ("B", -9999.0, [66]),
    ]


def test_a_prompts_own_token_comes_first_and_has_a_rank_only_among_the_likeliest() -> None:
    top = ((66, -0.5), (67, -1.0), (68, -2.0))
    first, second, third = prompt_logprobs(
        [65, 67, 70], [TokenLogprob(-1.0, top), TokenLogprob(-9.0, top)], 2, BYTES
    )
    assert first is None and second is not None and third is not None
    assert [(token, entry.rank) for token, entry in second.items()] == [(67, 2), (66, 1)]
    assert [(token, entry.rank, entry.logprob) for token, entry in third.items()] == [
        (70, None, -9.0),
        (66, 1, -0.5),
        (67, 2, -1.0),
    ]
    assert list(json.loads(msgspec.json.encode(second))) == ["67", "66"]
