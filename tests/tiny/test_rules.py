"""Sampling options reach the device by way of one table, and none is forgotten."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.device.rules import (
    RULE_PACKING,
    RULES,
    Rule,
    RulePacking,
    edits_for,
    mode_for,
    needs_memory,
)
from levserve.model.rules import NO_LOGPROBS, PROCESSED_LOGPROBS, Floats, Ints, Mode, Rules, Seeds
from levserve.schedule.request import GenerationRequest, LogprobsMode, Sampling

CHANGED: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.25,
    "min_p": 0.125,
    "presence_penalty": 0.75,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": ((3, 2.0),),
    "min_tokens": 4,
    "seed": 2**64 - 5,
    "num_logprobs": 0,
    "logprobs_mode": LogprobsMode.PROCESSED,
}
"""A value other than the default for every option."""


def request(**options: Any) -> GenerationRequest:
    return GenerationRequest("r", (1, 2, 3), 8, Sampling(**options), stop_ids=frozenset({5}))


def there_and_back(packing: RulePacking[Any], *requests: GenerationRequest) -> Any:
    columns = jnp.asarray(np.stack([packing.pack(one) for one in requests]))
    assert columns.shape[1] == packing.num_columns
    return jax.jit(packing.unpack)(columns)


def test_every_field_of_rules_is_in_the_table() -> None:
    assert list(RULES) == list(Rules._fields)


def test_every_sampling_option_reaches_the_device() -> None:
    assert CHANGED.keys() == {field.name for field in dataclasses.fields(Sampling)}
    for name, value in CHANGED.items():
        beside = {"num_logprobs": 1} if name == "logprobs_mode" else {}
        plain, changed = request(**beside), request(**beside | {name: value})
        is_packed = not np.array_equal(RULE_PACKING.pack(plain), RULE_PACKING.pack(changed))
        assert is_packed, f"{name} is lost"


def test_rules_arrive_as_they_were_asked_for() -> None:
    rules = there_and_back(RULE_PACKING, request(**CHANGED), request())
    asked = {
        "temperature": (0.5, 1.0),
        "top_k": (7, 0),
        "top_p": (0.25, 1.0),
        "min_p": (0.125, 0.0),
        "presence": (0.75, 0.0),
        "frequency": (-0.5, 0.0),
        "repetition": (1.5, 1.0),
        "prompt_len": (3, 3),
        "num_edits": (2, 0),
        "logprobs": (PROCESSED_LOGPROBS, NO_LOGPROBS),
    }
    assert {name: tuple(getattr(rules, name).tolist()) for name in asked} == asked
    assert rules.seed.dtype == jnp.uint32
    assert rules.seed.tolist() == [[2**32 - 5, 2**32 - 1], [0, 0]]


class Extended(NamedTuple):
    """`Rules` with made-up fields before and after a seed."""

    temperature: Floats
    made_up: Ints
    seed: Seeds
    also_made_up: Floats


def test_a_made_up_rule_travels_by_its_annotation_and_its_entry_alone() -> None:
    rules = {
        "temperature": RULES["temperature"],
        "made_up": Rule(lambda request: request.max_tokens),
        "seed": RULES["seed"],
        "also_made_up": Rule(lambda request: request.max_tokens / 4),
    }
    extended = there_and_back(RulePacking(Extended, rules), request(temperature=0.5, seed=2**32 + 1))
    assert extended.temperature.tolist() == [0.5]
    assert (extended.made_up.dtype, extended.made_up.tolist()) == (jnp.int32, [8])
    assert extended.seed.tolist() == [[1, 1]]
    assert (extended.also_made_up.dtype, extended.also_made_up.tolist()) == (jnp.float32, [2.0])


def test_a_field_without_an_entry_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match=r"\['also_made_up', 'made_up'\]"):
        RulePacking(Extended, {name: RULES[name] for name in ("temperature", "seed")})


@pytest.mark.parametrize(
    ("options", "mode", "is_remembered"),
    [
        ({"temperature": 0.0}, Mode.GREEDY, False),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7}, Mode.GREEDY, False),
        ({}, Mode.PLAIN, False),
        ({"temperature": 0.0, "num_logprobs": 0}, Mode.FULL, False),
        ({"presence_penalty": 0.5}, Mode.FULL, True),
        ({"frequency_penalty": 0.5}, Mode.FULL, True),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, Mode.FULL, True),
        ({"logit_bias": ((3, 2.0),)}, Mode.FULL, True),
        ({"min_tokens": 2}, Mode.FULL, True),
    ],
)
def test_a_request_gets_the_cheapest_mode_that_honours_it(
    options: dict[str, Any], mode: Mode, is_remembered: bool
) -> None:
    assert mode_for(request(**options)) is mode
    assert needs_memory(request(**options)) is is_remembered


def test_stop_tokens_are_banned_until_enough_tokens_were_generated() -> None:
    edits = edits_for(request(logit_bias=((3, 2.0),), min_tokens=4))
    assert edits.ids[:3].tolist() == [3, 5, 0]
    assert edits.values[0] == 2.0 and edits.values[1] < -1e20
    assert edits.until[:3].tolist() == [2**31 - 1, 7, 0]
