"""What a program may give to the Python API, and what it is told of anything else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from levserve.api.model import Model
from levserve.errors import BadRequest, ContextTooLong, DeadlineExceeded
from levserve.settings.settings import Settings
from tests.fake_app import App, serving

LONG = "t17 " * 100
SHORT = {"max_tokens": 1, "temperature": 0}


@pytest.fixture
def app() -> Iterator[App]:
    with serving(obeys=True) as app:
        yield app


@pytest.fixture
def model(app: App) -> Iterator[Model]:
    with Model(app.registry, Settings()) as model:
        yield model


@pytest.mark.parametrize(
    "prompts",
    [
        [[17, 18], [20]],
        [np.array([17, 18]), np.array([20])],
        [np.array([17, 18], np.int32), [np.int64(20)]],
        ([17, 18], range(20, 21)),
    ],
)
def test_lists_of_numpy_arrays_are_lists_of_token_ids(model: Model, prompts: Any) -> None:
    wanted = model.generate(["t17 t18", "t20"], **SHORT)
    assert model.generate(prompts, **SHORT) == wanted
    assert asyncio.run(model.agenerate(prompts, **SHORT)) == wanted
    np.testing.assert_array_equal(model.embed(prompts), model.embed(["t17 t18", "t20"]))
    scores = model.score([(prompt, prompt) for prompt in prompts])
    assert scores == model.score([([17, 18], [17, 18]), ([20], [20])])
    assert {type(token) for score in scores for token in score.tokens} == {int}


def test_keys_and_items_of_a_dict_are_lists_in_its_order(model: Model) -> None:
    continuations = {"t17 t18": " t19", "t20": " t21"}
    assert model.generate(continuations.keys(), **SHORT) == model.generate(list(continuations), **SHORT)
    assert model.score(continuations.items()) == model.score(list(continuations.items()))


WRONG = [None, 5, b"t17", bytearray(b"t17"), memoryview(b"t17"), {"t17": 1}, {17, 18}, object(), np.array(17)]
WRONG_TOKENS = [[True, False], [17, True], [np.True_], [17.0], [17, "t18"], [17, None], np.array([17.0])]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_prompt_is_refused_with_the_argument_and_the_type(model: Model, wrong: Any) -> None:
    kind = type(wrong).__name__
    for call, argument in (
        (model.generate, "prompts"),
        (model.embed, "texts"),
        (model.stream, "prompt"),
        (model.astream, "prompt"),
        (model.score, "pairs"),
        (model.chat_many, "conversations"),
    ):
        with pytest.raises(BadRequest, match=f"'{argument}': .* but got {kind}"):
            call(wrong)
    if not isinstance(wrong, (int, np.ndarray, type(None))):
        with pytest.raises(BadRequest, match=rf"prompts\[1\]: .* but got {kind}"):
            model.generate(["t17", wrong], **SHORT)
    with pytest.raises(BadRequest, match=rf"pairs\[1\]: .*'prompt'.* but got {kind}"):
        model.score([([17], [18]), (wrong, [18])])
    with pytest.raises(BadRequest, match=rf"pairs\[1\]: .*'continuation'.* but got {kind}"):
        model.score([([17], [18]), ([17], wrong)])


@pytest.mark.parametrize("wrong", WRONG_TOKENS, ids=repr)
def test_what_is_no_token_id_is_refused(model: Model, wrong: Any) -> None:
    words = "token ids are integers, and one of them is a (bool|float|str|NoneType)"
    for call in (model.generate, model.embed, model.stream):
        with pytest.raises(BadRequest, match=words):
            call(wrong)
        if call != model.stream:
            with pytest.raises(BadRequest, match=rf"\[1\]: .*{words}"):
                call([[17], wrong])  # type: ignore[operator]
    for pair in ((wrong, [18]), ([17], wrong)):
        with pytest.raises(BadRequest, match=words):
            model.score([pair])


@pytest.mark.parametrize("wrong", ["", [10**9]], ids=repr)
def test_what_no_model_could_read_is_refused_by_the_arguments_name(model: Model, wrong: Any) -> None:
    for call, argument in ((model.generate, "prompts"), (model.stream, "prompt")):
        with pytest.raises(BadRequest, match=f"^'{argument}' has ") as refused:
            call(wrong)
        assert refused.value.param == argument
    with pytest.raises(BadRequest, match=r"^prompts\[1\]: 'prompts' has "):
        model.generate(["t17", wrong])


@pytest.mark.parametrize(
    "fields", [{"stop": b"x"}, {"stop": ["x", b"y"]}, {"response_format": {"type": b"text"}}]
)
def test_bytes_in_a_field_are_refused_and_not_read_as_base64(model: Model, fields: Any) -> None:
    with pytest.raises(BadRequest, match="bytes is not accepted"):
        model.generate("t17", **fields)
    with pytest.raises(BadRequest, match=r"'messages\[0\].content': bytes"):
        model.chat([{"role": "user", "content": b"t17"}])


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": "1"},
        {"priority": 1.5},
        {"priority": True},
        {"priority": [1]},
        {"timeout": "1"},
        {"timeout": 0},
        {"timeout": math.nan},
        {"timeout": np.float32("nan")},
    ],
    ids=repr,
)
def test_scores_and_embeddings_check_their_fields_as_the_server_does(
    model: Model, fields: dict[str, Any]
) -> None:
    (name,) = fields
    for call in (
        lambda: model.score([([17], [18])], **fields),
        lambda: model.embed(["t17"], **fields),
        lambda: model.generate(["t17"], **fields),
    ):
        with pytest.raises(BadRequest, match=f"^Invalid .* '{name}'") as caught:
            call()
        assert caught.value.param == name


def test_fields_of_one_call_are_checked_too(model: Model) -> None:
    for wrong in ("1", 1.5, True, 0, -2):
        with pytest.raises(BadRequest, match="'truncate_prompt_tokens'"):
            model.score([([17], [18])], truncate_prompt_tokens=wrong)  # type: ignore[arg-type]
    for fields in ({"pooling": "max"}, {"pooling": 1}, {"add_special_tokens": "yes"}):
        with pytest.raises(BadRequest, match=f"'{next(iter(fields))}'"):
            model.embed(["t17"], **fields)  # type: ignore[arg-type]


def test_a_field_that_is_none_has_its_default(app: App, model: Model) -> None:
    nothing: Any = None
    model.score([([17], [18])], priority=nothing, timeout=nothing, truncate_prompt_tokens=nothing)
    model.embed(["t17"], priority=nothing, pooling=nothing, add_special_tokens=nothing)
    assert [request.priority for request in app.device.requests[-2:]] == [0, 0]


def test_an_error_begins_with_the_place_of_the_item(model: Model) -> None:
    with pytest.raises(ContextTooLong, match=r"^prompts\[2\]: This model's maximum context") as caught:
        model.generate(["t17", "t18", LONG], **SHORT)
    assert caught.value.message == str(caught.value) and caught.value.param == "prompts"
    with pytest.raises(ContextTooLong, match=r"^prompts\[0\]: "):
        asyncio.run(model.agenerate([LONG], **SHORT))
    with pytest.raises(ContextTooLong, match=r"^texts\[1\]: "):
        model.embed(["t17", LONG])
    with pytest.raises(BadRequest, match=r"^pairs\[1\]: 'continuations\[1\]' has the token id -1"):
        model.score([([17], [18]), ([17], [-1])])
    with pytest.raises(BadRequest, match=r"^conversations\[1\]: .*'messages'"):
        model.chat_many([[{"role": "user", "content": "t17"}], []])
    with pytest.raises(DeadlineExceeded, match=r"^prompts\[1\]: "):
        model.generate(["t17", "t4"], timeout=0.1, **SHORT)


def test_an_error_of_a_single_prompt_or_of_a_field_has_no_place(model: Model) -> None:
    for call in (
        lambda: model.generate(LONG),
        lambda: model.generate([17, 10_000]),
        lambda: model.generate(["t17"], temperature=9),
        lambda: model.generate(["t17"], logit_bias={10_000: 1}),
        lambda: model.score([([17], [18])], timeout=-1),
        lambda: model.chat([]),
    ):
        with pytest.raises(BadRequest, match="^('|Invalid|This model)"):
            call()


def test_weights_that_are_no_mapping_are_refused(model: Model) -> None:
    for wrong in (None, [1], "model.safetensors"):
        with pytest.raises(BadRequest, match=f"'arrays' .* is not a {type(wrong).__name__}"):
            model.load_weights(wrong)  # type: ignore[arg-type]
