"""Streamed text: joins to what decoding all tokens at once gives, and never contains part of a character."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levserve.text.detokenizer import Detokenizer, Spelling, read_spelling
from levserve.text.tokenizer import Tokenizer, load_tokenizer

SCRIPTS = st.text(st.sampled_from("ab \n.é東京한국🎉👩\u200d🚀🏽e\u0301क्षि\u0627\u064b"), max_size=30)
# SmolLM2's vocabulary lacks some control characters and the bytes that begin characters above U+3FFFF.
ANY_SCRIPT = st.text(st.characters(exclude_categories=("Cc", "Cs"), max_codepoint=0x3FFFF), max_size=30)
CUTS = st.lists(st.integers(0, 40), max_size=6)
# The first 17 tokens are special, the last have no text.
TOKENS = st.lists(st.integers(0, 49_200) | st.integers(0, 300), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(bundled_gguf: Path) -> Tokenizer:
    return load_tokenizer(bundled_gguf)


def split(tokens: Sequence[int], cuts: Sequence[int]) -> Iterator[Sequence[int]]:
    for start, end in pairwise([0, *sorted(cuts), max(len(tokens), *cuts, 0)]):
        yield tokens[start:end]


def stream(detokenizer: Detokenizer, pieces: Iterator[Sequence[int]]) -> list[str]:
    return [*(detokenizer.add(piece) for piece in pieces), detokenizer.flush()]


@given(tokens=TOKENS, cuts=CUTS, skip=st.booleans())
def test_streamed_pieces_join_to_the_whole_text(
    tokenizer: Tokenizer, tokens: list[int], cuts: list[int], skip: bool
) -> None:
    pieces = stream(tokenizer.detokenizer(skip_special_tokens=skip), split(tokens, cuts))
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=skip)


@given(tokens=TOKENS, skip=st.booleans())
def test_whole_text_is_what_the_tokenizers_library_decodes(
    tokenizer: Tokenizer, tokens: list[int], skip: bool
) -> None:
    assert tokenizer.decode(tokens, skip_special_tokens=skip) == tokenizer.backend.decode(
        tokens, skip_special_tokens=skip
    )


@given(text=SCRIPTS | ANY_SCRIPT)
def test_no_piece_of_a_real_text_has_a_replacement_character(tokenizer: Tokenizer, text: str) -> None:
    pieces = stream(tokenizer.detokenizer(), ([token] for token in tokenizer.encode(text)))
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")
    assert pieces[-1] == ""


@given(text=SCRIPTS)
def test_text_is_shown_as_soon_as_its_characters_are_complete(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = tokenizer.detokenizer()
    tokens = tokenizer.encode(text)
    shown = ""
    for count, token in enumerate(tokens, start=1):
        shown += detokenizer.add([token])
        received = b"".join(tokenizer.token_bytes(token) for token in tokens[:count])
        assert shown == received.decode(errors="ignore")


def test_half_a_character_waits_for_its_other_half(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    halves = tokenizer.encode("東")
    assert len(halves) > 1
    assert [detokenizer.add([token]) for token in halves] == [""] * (len(halves) - 1) + ["東"]
    assert detokenizer.flush() == ""


def test_half_a_character_at_the_end_becomes_one_replacement_character(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.add(tokenizer.encode("a東")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_half_a_character_followed_by_another_becomes_a_replacement_character(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.add(tokenizer.encode("東")[:1]) == ""
    assert detokenizer.add(tokenizer.encode("a")) == "\ufffda"


def test_stream_of_a_thousand_invalid_bytes_is_not_held_back(tokenizer: Tokenizer) -> None:
    (stray,) = (token for token in range(300) if tokenizer.token_bytes(token) == b"\x80")
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.add([stray]) for _ in range(1_000)) == "\ufffd" * 1_000


def test_special_tokens_are_shown_only_when_asked_for(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("Hello<|im_end|>")
    assert stream(tokenizer.detokenizer(), iter([tokens])) == ["Hello", ""]
    assert stream(tokenizer.detokenizer(skip_special_tokens=False), iter([tokens])) == ["Hello<|im_end|>", ""]


def test_words_of_a_vocabulary_without_a_decoder_are_separated_by_spaces() -> None:
    words = Detokenizer([b"t0", b"t1", None, b"t3"].__getitem__, read_spelling(None))
    assert [words.add([0]), words.add([2, 1]), words.add([]), words.add([3])] == ["t0", " t1", "", " t3"]


def test_text_that_continues_a_prompt_keeps_the_space_before_its_first_word() -> None:
    words = Detokenizer([b"t0", b"t1"].__getitem__, Spelling(separator=b" "), continues=True)
    assert words.add([0, 1]) == " t0 t1"
    pieces = Detokenizer([b" Paris"].__getitem__, Spelling(drops_first_space=True), continues=True)
    assert pieces.add([0]) == " Paris"


def test_only_the_first_space_of_a_text_is_dropped() -> None:
    pieces = Detokenizer([b"  a", b"", b" b"].__getitem__, Spelling(drops_first_space=True))
    assert [pieces.add([1]), pieces.add([0]), pieces.add([2])] == ["", " a", " b"]
