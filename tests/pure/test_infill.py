"""Fill in the middle: `suffix` in completions becomes a prompt in the format of each model family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from levserve.errors import BadRequest, ContextTooLong
from levserve.request.decode import decode
from levserve.request.policy import Policy
from levserve.request.schema import CompletionBody
from levserve.request.submission import Seeds, prepare
from levserve.schedule.request import GenerationRequest
from levserve.text.infill import FAMILIES, Marks, find_infill
from levserve.text.tokenizer import Tokenizer
from levserve.text.vocabulary import Vocabulary
from tests.fake_app import App, serving
from tests.fake_device import MAX_SEQ_LEN, MODEL, serve_toy

QWEN, CODESTRAL = FAMILIES[0], FAMILIES[-1]
CODE_LLAMA = FAMILIES[-2]


def names_of(marks: Marks) -> list[str]:
    return [name for name in (marks.prefix, marks.suffix, marks.middle, *marks.ends) if name is not None]


def byte_tokenizer(*specials: str) -> Tokenizer:
    """A tokenizer in which each byte is a token, as is each of the special tokens."""
    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE({piece: place for place, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in specials])
    return Tokenizer(Vocabulary(backend, eos_ids=frozenset((0,)), eos_token="</s>", chat_template=None))


def spaced_tokenizer(marks: Marks, *, by_normalizer: bool) -> Tokenizer:
    """A tokenizer of characters that puts a space before each text, in one of the two ways found in files."""
    pieces = ["<s>", "</s>", "<unk>", "▁", *"abcxyz☺", *names_of(marks)]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    if by_normalizer:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>", *names_of(marks))])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(Vocabulary(backend, eos_ids=frozenset((1,)), chat_template=None, **special))


def prompt_of(
    tokenizer: Tokenizer, prefix: str, suffix: str, *, add_special_tokens: bool = True
) -> list[str]:
    infill = find_infill(tokenizer)
    assert infill is not None
    before = infill.encode_prefix(prefix)
    tokens = infill.make_prompt(before, suffix, add_special_tokens=add_special_tokens)
    return [tokenizer.backend.id_to_token(token) for token in tokens]


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: marks.prefix)
def test_each_familys_tokens_stand_where_it_was_trained_to_see_them(marks: Marks) -> None:
    prompt = prompt_of(byte_tokenizer(*names_of(marks)), "ab", "cd")
    if marks.middle is None:
        assert prompt == [marks.suffix, "c", "d", marks.prefix, "a", "b"]
    else:
        assert prompt == [marks.prefix, "a", "b", marks.suffix, "c", "d", marks.middle]


def test_a_vocabulary_that_lacks_a_mark_cannot_fill_in() -> None:
    assert find_infill(byte_tokenizer()) is None
    assert find_infill(byte_tokenizer("<|fim_prefix|>", "<|fim_suffix|>")) is None
    found = find_infill(byte_tokenizer("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))
    assert found is not None and found.stop_ids == {257, 258, 259}, "ends that it lacks are not missed"


def test_marks_in_the_texts_are_ordinary_text() -> None:
    prompt = prompt_of(byte_tokenizer(*names_of(QWEN)), "a<|fim_suffix|>", "<|fim_middle|>b")
    assert [piece for piece in prompt if piece.startswith("<|")] == [QWEN.prefix, QWEN.suffix, QWEN.middle]
    assert len(prompt) == 3 + len("a<|fim_suffix|>") + len("<|fim_middle|>b")


@pytest.mark.parametrize("by_normalizer", [False, True])
@pytest.mark.parametrize("marks", [CODE_LLAMA, CODESTRAL], ids=["code llama", "codestral"])
def test_a_prefix_gets_the_tokenizers_space_and_a_suffix_does_not(marks: Marks, by_normalizer: bool) -> None:
    """As in the models' own libraries; the end token that the tokenizer adds after a text is left out."""
    tokenizer = spaced_tokenizer(marks, by_normalizer=by_normalizer)
    before, after = [marks.prefix, "▁", "a", "▁", "b"], [marks.suffix, "x", "▁", "y"]
    wanted = [*after, *before] if marks.middle is None else [*before, *after, marks.middle]
    assert prompt_of(tokenizer, "a b", "x y") == ["<s>", *wanted]
    assert prompt_of(tokenizer, "a b", "x y", add_special_tokens=False) == wanted
    empty = prompt_of(tokenizer, "", "x", add_special_tokens=False)
    assert sorted(empty) == sorted([name for name in (*marks[:3], "x") if name is not None])


def requests(tokenizer: Tokenizer, policy: Policy | None = None, **fields: Any) -> list[GenerationRequest]:
    body = decode(json.dumps({"model": MODEL, "max_tokens": 4} | fields).encode(), CompletionBody)
    served = serve_toy(MODEL, MAX_SEQ_LEN, tokenizer)
    return prepare(body, served, Seeds(None), "id", None, policy or Policy()).requests


@pytest.fixture(scope="module")
def coder() -> Tokenizer:
    return byte_tokenizer(*names_of(QWEN))


def test_a_middle_ends_at_any_of_the_familys_tokens(coder: Tokenizer) -> None:
    (request,) = requests(coder, prompt="ab", suffix="cd")
    ids = {coder.backend.token_to_id(name) for name in names_of(QWEN)}
    assert request.stop_ids == ids | {0}
    assert requests(coder, prompt="ab", suffix="cd", ignore_eos=True)[0].stop_ids == frozenset()
    assert requests(coder, prompt="ab")[0].stop_ids == {0}, "only where a middle is asked for"


def test_every_prompt_of_a_request_gets_the_suffix_and_may_be_tokens_or_empty(coder: Tokenizer) -> None:
    texts = requests(coder, prompt=["ab", ""], suffix="cd")
    assert [len(request.prompt) for request in texts] == [7, 5]
    (tokens,) = requests(coder, prompt=list(texts[0].prompt[1:3]), suffix="cd")
    assert tokens.prompt == texts[0].prompt
    (plain,) = requests(coder, prompt="ab", suffix="")
    assert len(plain.prompt) == 2, "an empty suffix asks for nothing"


def test_what_does_not_fit_is_refused_and_never_cut(coder: Tokenizer) -> None:
    policy = Policy(truncates_prompts=True)
    for given in (None, policy):
        with pytest.raises(ContextTooLong, match="67 in the prompt"):
            requests(coder, given, prompt="a" * 32, suffix="b" * 32)
    assert len(requests(coder, policy, prompt="a" * 100)[0].prompt) == MAX_SEQ_LEN - 4, "without one it is"
    with pytest.raises(ContextTooLong) as caught:
        requests(coder, prompt="a", suffix="b" * 10_000)
    assert caught.value.param == "suffix"


def test_a_model_without_the_tokens_says_so() -> None:
    with pytest.raises(BadRequest, match="no tokens for that") as caught:
        requests(byte_tokenizer(), prompt="a", suffix="b")
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_parameter")


@pytest.fixture
def app() -> Iterator[App]:
    with serving() as app:
        yield app


def test_over_http_a_field_that_does_not_go_with_it_is_refused_by_name(app: App) -> None:
    body = {"model": "toy", "prompt": "t17", "suffix": "t19"}
    assert app.refuse("/v1/completions", body) == (400, "suffix")
    assert app.refuse("/v1/completions", body | {"echo": True}) == (400, "echo")
    assert app.refuse("/v1/completions", body | {"truncate_prompt_tokens": 3}) == (
        400,
        "truncate_prompt_tokens",
    )
    chat = {"model": "toy", "messages": [{"role": "user", "content": "t17"}], "suffix": "t19"}
    assert app.refuse("/v1/chat/completions", chat) == (400, "suffix")
