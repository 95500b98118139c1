"""Constraints that begin at a mark: after a tool's trigger, or after the thoughts."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from levserve.schedule.constraint import Constraint, Matcher
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.text.grammar import GrammarKind, Grammars
from levserve.text.mark import Mark
from levserve.text.phases import Triggered
from levserve.text.thought_phases import AfterThoughts, encode_marks
from levserve.text.tokenizer import Tokenizer
from levserve.text.vocabulary import Vocabulary
from tests.pure import test_constraint as toys
from tests.pure.test_grammar import asked

ROWS = 352
MERGES = [
    ("<", "t"),
    ("<", "/"),
    (">", "Ċ"),
    (">", "1"),
    ("Ċ", "Ċ"),
    ("t", ">"),
    ("t>", "2"),
    ("t>", "x"),
    ("1", "2"),
]
SPECIALS = ["<end>", "[T]", "[/T]"]


def make_tokenizer() -> Tokenizer:
    """A tokenizer with every byte, tokens that cross the ends of marks, and marks that are special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(pair) for pair in MERGES)]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    end = backend.token_to_id("<end>")
    return Tokenizer(Vocabulary(backend, eos_token="<end>", eos_ids=frozenset((end,))))


TOKENIZER = make_tokenizer()
(END,) = TOKENIZER.eos_ids
GRAMMARS = Grammars(TOKENIZER, ROWS, lambda seconds: None)
NUMBER = GRAMMARS.compile(asked(GrammarKind.REGEX, "12?[.]"))


def token(text: str) -> int:
    found = TOKENIZER.backend.token_to_id(text.replace("\n", "Ċ"))
    assert found is not None
    return found


def triggered(mark: str = "<t>", inner: Constraint = NUMBER, max_times: int = 2) -> Triggered:
    return Triggered(Mark(mark, TOKENIZER), inner, TOKENIZER, ROWS, max_times=max_times)


def after_thoughts(
    end: str = "</t>",
    inner: Constraint | None = NUMBER,
    *,
    opening: str | None = None,
    budget: int | None = None,
    closing: str | None = None,
) -> AfterThoughts:
    mark = None if opening is None else Mark(opening, TOKENIZER)
    return AfterThoughts(
        Mark(end, TOKENIZER), inner, TOKENIZER, ROWS, opening=mark, budget=budget, closing=closing
    )


def allowed(matcher: Matcher) -> set[int]:
    bits = int.from_bytes(matcher.mask(), "little")
    assert len(matcher.mask()) == ROWS // 8
    return {token for token in range(ROWS) if bits >> token & 1}


def check(matcher: Matcher) -> None:
    """Checks that `allows`, `mask` and `forced` agree."""
    may_follow = allowed(matcher)
    assert may_follow == {token for token in range(ROWS) if matcher.allows(token)}
    forced = matcher.forced()
    if forced:
        assert may_follow == {forced[0]}


def feed(matcher: Matcher, *texts: str) -> None:
    for text in texts:
        assert matcher.allows(token(text)), text
        matcher.take(token(text))


def test_text_is_free_up_to_the_trigger_and_held_after_it() -> None:
    matcher = triggered().start()
    feed(matcher, "a", "<t", "x", "<", "t")
    assert matcher.is_free and matcher.allows(END) and not matcher.ends_with(END)
    feed(matcher, ">")
    assert not matcher.is_free
    assert allowed(matcher) == {token("1"), token("12")}
    feed(matcher, "1", ".")
    assert matcher.is_free and not matcher.is_over
    feed(matcher, "<t", ">", "12", ".")
    assert matcher.is_over


def test_a_token_may_carry_the_beginning_of_what_follows_the_trigger() -> None:
    matcher = triggered().start()
    feed(matcher, "<t", ">1")
    assert allowed(matcher) == {token("."), token("2")}


def test_a_token_that_goes_on_after_the_trigger_as_the_constraint_does_not_is_refused() -> None:
    matcher = triggered().start()
    feed(matcher, "<")
    assert token("t>x") not in allowed(matcher) and not matcher.allows(token("t>x"))
    assert not matcher.allows(token("t>2"))
    assert matcher.allows(token("t>"))


def test_a_special_token_may_be_the_trigger() -> None:
    matcher = triggered("[T]").start()
    feed(matcher, "a", "[T]")
    assert not matcher.is_free and matcher.allows(token("1"))


def test_an_answer_may_end_in_free_text_only() -> None:
    matcher = triggered().start()
    assert matcher.allows(END)
    feed(matcher, "<t", ">", "1")
    assert not matcher.allows(END)


def test_thoughts_are_free_and_the_constraint_holds_after_the_end_mark_and_its_newlines() -> None:
    matcher = after_thoughts().start()
    feed(matcher, "a", "</", "x")
    assert matcher.is_free and not matcher.allows(END)
    feed(matcher, "</", "t", ">\n", "\n")
    assert allowed(matcher) >= {token("1"), token("12")}
    feed(matcher, "\n")
    assert allowed(matcher) == {token("1"), token("12")}
    feed(matcher, "12", ".")
    assert matcher.is_over


def test_thoughts_may_be_ended_by_a_token_that_begins_the_answer() -> None:
    matcher = after_thoughts().start()
    feed(matcher, "</", "t", ">1", ".")
    assert matcher.is_over


def test_after_the_budget_the_end_mark_is_forced() -> None:
    matcher = after_thoughts("[/T]", budget=2, closing="\n[/T]\n\n").start()
    feed(matcher, "a")
    assert matcher.forced() == ()
    feed(matcher, "b")
    assert list(matcher.forced()) == [token("\n"), token("[/T]"), token("\n\n")]
    check(matcher)
    for forced in list(matcher.forced()):
        matcher.take(forced)
    assert allowed(matcher) == {token("1"), token("12")}


def test_thoughts_that_end_within_the_budget_are_not_cut() -> None:
    matcher = after_thoughts(inner=None, budget=3).start()
    feed(matcher, "</", "t", ">", "a", "b", "c")
    assert matcher.is_free and matcher.allows(END) and matcher.forced() == ()


def test_a_budget_of_nothing_closes_an_open_thought_at_once() -> None:
    assert list(after_thoughts("[/T]", budget=0).start().forced()) == [token("[/T]")]


@pytest.mark.parametrize("inner", [NUMBER, None])
def test_a_model_may_open_a_thought_or_answer_at_once(inner: Constraint | None) -> None:
    answers = after_thoughts(inner=inner, opening="<t>", budget=1).start()
    feed(answers, "1", ".")
    assert answers.is_over or answers.is_free
    thinks = after_thoughts(inner=inner, opening="<t>", budget=1).start()
    feed(thinks, "<t", ">")
    assert thinks.is_free
    feed(thinks, "a")
    assert list(thinks.forced()) == encode_marks(TOKENIZER, "</t>")


def test_once_a_thought_is_being_opened_an_answer_that_begins_otherwise_cannot_begin() -> None:
    matcher = after_thoughts(opening="<t>").start()
    assert allowed(matcher) == {token("<"), token("<t"), token("1"), token("12")}
    feed(matcher, "<")
    assert {token("t"), token("t>")} <= allowed(matcher) and not matcher.allows(token("1"))


def test_an_answer_may_begin_as_a_thought_does() -> None:
    tagged = GRAMMARS.compile(asked(GrammarKind.REGEX, "<(tx|b)>"))
    matcher = after_thoughts(opening="<t>", inner=tagged).start()
    feed(matcher, "<", "t")
    assert {token(">"), token("x")} <= allowed(matcher)
    feed(matcher, "x", ">")
    assert matcher.is_over
    thinks = after_thoughts(opening="<t>", inner=tagged).start()
    feed(thinks, "<", "t", ">", "a", "</", "t", ">", "<", "b", ">")
    assert thinks.is_over


def test_thoughts_may_be_the_end_where_an_answer_may_be_empty() -> None:
    for inner, may_end in ((triggered(), True), (NUMBER, False)):
        matcher = after_thoughts(inner=inner).start()
        feed(matcher, "a")
        assert matcher.allows(END) is may_end
        check(matcher)


constraints = st.sampled_from(
    [
        triggered(),
        triggered("[T]"),
        after_thoughts(),
        after_thoughts("[/T]", opening="[T]", budget=3),
        after_thoughts(opening="<t>", budget=6, closing="\n</t>\n"),
        after_thoughts(inner=None, opening="<t>", budget=2),
        after_thoughts(inner=triggered(), opening="<t>", budget=4),
        after_thoughts(
            inner=GRAMMARS.compile(asked(GrammarKind.REGEX, "<t?[a-z]{2}")), opening="<t>", budget=3
        ),
    ]
)
LIKELY = [token(text) for text in ("<", "<t", "t", "t>", "</", ">", ">1", ">\n", "1", "2", ".", "\n", "a")]


@settings(max_examples=60, deadline=None)
@given(constraints, st.integers(0, 10**6))
def test_what_is_allowed_masked_and_forced_agree_at_every_token(rule: Constraint, seed: int) -> None:
    chooser = random.Random(seed)
    matcher = rule.start()
    tokens: list[int] = []
    while not matcher.is_over and len(tokens) < 40:
        check(matcher)
        assert not matcher.is_stuck
        may_follow = allowed(matcher) - {END}
        likely = may_follow.intersection([*LIKELY, token("[T]"), token("[/T]")])
        drawn = chooser.choice(sorted(likely or may_follow))
        matcher.take(drawn)
        tokens.append(drawn)
    if isinstance(rule, Triggered):
        _, *runs = TOKENIZER.decode(tokens, skip_special_tokens=False).split(rule.mark.text)
        assert len(runs) <= 2
        assert all(re.match("12?[.]", run) for run in runs[:-1])


def toy_tokenizer() -> Tokenizer:
    """The tokens of the toy device: letters, marks, and tokens that cross a mark's end."""
    merges = [("b", "b"), ("bb", "c"), ("c", "d"), ("d", "d")]
    texts = ["a", "b", "c", "d", "e", "f", "g", "bb", "bbc", "cd", "dd"]
    backend = tokenizers.Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, merges))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(Vocabulary(backend, eos_token="<end>", eos_ids=frozenset((toys.END,))))


TOY = toy_tokenizer()
TOY_ROWS = 32


def toy_phases(inner: Constraint, mark: str, budget: int | None, is_open: bool) -> list[Constraint]:
    opening = None if is_open else Mark("bb", TOY)
    return [
        Triggered(Mark(mark, TOY), inner, TOY, TOY_ROWS, max_times=2),
        AfterThoughts(Mark(mark, TOY), inner, TOY, TOY_ROWS, opening=opening, budget=budget),
        AfterThoughts(Mark(mark, TOY), None, TOY, TOY_ROWS, opening=opening, budget=budget),
    ]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(toys.rules, st.sampled_from("bc d e cd".split()), st.booleans()), min_size=1, max_size=2
    ),
    st.none() | st.integers(0, 4),
    st.integers(1, 8),
    st.integers(20, 40),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_the_text_does_not_depend_on_rounds_or_company(
    rules: Sequence[tuple[toys.ToyConstraint, str, bool]],
    budget: int | None,
    steps: int,
    pages: int,
    slots: int,
    seed: int,
) -> None:
    server = toys.make_server(pages=pages, slots=slots, steps=steps)
    requests = []
    for rule, mark, is_open in rules:
        for phased in toy_phases(rule, mark, budget, is_open):
            name = f"r{len(requests)}"
            requests.append(
                GenerationRequest(
                    name, (1, 2), 20, Sampling(seed=seed), frozenset((toys.END,)), constraint=phased
                )
            )
            server.submit(requests[-1])
    server.run()
    for request in requests:
        tokens, finish = toys.expected(request)
        assert server.outputs[request.request_id] == tokens
        assert server.finishes[request.request_id] == [finish]
