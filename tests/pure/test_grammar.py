"""Schemas, expressions, choices and grammars, followed token by token."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLExecutor
from tokenizers import models, pre_tokenizers

from levserve.device.masks import fill_masks
from levserve.errors import BadRequest
from levserve.observe.metrics import Metrics
from levserve.schedule.constraint import Fit, Matcher, take_fitting
from levserve.text.grammar import GrammarKind, Grammars, GrammarText
from levserve.text.json_schema import check_schema
from levserve.text.token_rules import AllowedTokens, BannedWords
from levserve.text.tokenizer import Tokenizer
from levserve.text.tools.arguments import arguments_schema, bare_to_json, is_bare, split_arguments
from levserve.text.tools.request import Tool
from levserve.text.vocabulary import Vocabulary
from tests.pure.test_metrics import parse

MERGES = [
    ("{", '"'),
    ('"', ":"),
    (",", "Ġ"),
    ("Ġ", '"'),
    ('":', "Ġ"),
    ("a", "g"),
    ("ag", "e"),
    ("n", "a"),
    ("m", "e"),
    ("na", "me"),
]
ROWS = 320
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def make_tokenizer(*added: str, is_special: bool = True) -> Tokenizer:
    """A tokenizer with every byte, a few merges and an end token; the model's vocabulary has more rows.

    The end token may be an ordinary added one, and others may be added after it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(pair) for pair in MERGES)]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken("<end>", special=is_special), *added])
    end = backend.token_to_id("<end>")
    return Tokenizer(Vocabulary(backend, eos_token="<end>", eos_ids=frozenset((end,))))


TOKENIZER = make_tokenizer()
(END,) = TOKENIZER.eos_ids
COMPILED: list[float | None] = []
GRAMMARS = Grammars(TOKENIZER, ROWS, COMPILED.append)


def asked(kind: GrammarKind, value: Any, **given: Any) -> GrammarText:
    text = value if kind in (GrammarKind.REGEX, GrammarKind.GRAMMAR) else json.dumps(value)
    return GrammarText(kind, text, "field", **given)


def write(wanted: GrammarText, seed: int, limit: int = 400) -> str:
    """A text drawn at random from what the grammar allows; fails if it does not end."""
    matcher = GRAMMARS.compile(wanted).start()
    chooser = random.Random(seed)
    tokens: list[int] = []
    while not matcher.is_over:
        assert len(tokens) < limit and not matcher.is_stuck
        bits = int.from_bytes(matcher.mask(), "little")
        allowed = [token for token in range(ROWS) if bits >> token & 1]
        token = chooser.choice(allowed)
        if matcher.ends_with(token):
            break
        matcher.take(token)
        tokens.append(token)
    return TOKENIZER.decode(tokens)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_a_text_that_ends_fulfils_its_schema(seed: int) -> None:
    text = write(asked(GrammarKind.JSON_SCHEMA, PERSON), seed)
    person = json.loads(text)
    assert list(person) == ["name", "age"]
    assert len(person["name"]) <= 6 and 0 <= person["age"] <= 150
    assert text == json.dumps(person, ensure_ascii=False, separators=(", ", ": ")) or "\\" in text


def test_white_space_is_fixed_unless_a_pattern_is_asked_for() -> None:
    assert re.fullmatch(
        r'\{"name": ".*", "age": \d+\}', write(asked(GrammarKind.JSON_SCHEMA, PERSON), 1), re.DOTALL
    )
    loose = asked(
        GrammarKind.JSON_SCHEMA,
        {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2},
        whitespace="[_]{1,2}",
    )
    assert re.fullmatch(r"_*\[_*1_*,_*1_*\]_*", write(loose, 3))


def test_a_keyword_at_its_default_constrains_nothing() -> None:
    items = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": False}
    assert write(asked(GrammarKind.JSON_SCHEMA, items), 1) == "[1, 1]"


def test_expressions_choices_and_grammars_of_both_kinds_hold() -> None:
    for seed in range(5):
        assert re.fullmatch("[0-9]{4}-[0-9]{2}", write(asked(GrammarKind.REGEX, "[0-9]{4}-[0-9]{2}"), seed))
        assert re.fullmatch("[0-9]{8}", write(asked(GrammarKind.REGEX, r"\d{4}[\d]{4}"), seed)), "ASCII"
        choices = ["a.b", "(c)", "d|e", "f-g/h", "ü"]
        assert write(asked(GrammarKind.CHOICE, choices), seed) in choices
        assert write(asked(GrammarKind.GRAMMAR, 'root ::= "yes" | "no" " way"?'), seed) in (
            "yes",
            "no",
            "no way",
        )
        assert re.fullmatch("x[0-9]+", write(asked(GrammarKind.GRAMMAR, 'start: "x" /[0-9]{1,3}/'), seed))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_the_mask_allows_what_the_check_allows_and_forced_tokens_are_alone(seed: int) -> None:
    matcher = GRAMMARS.compile(asked(GrammarKind.JSON_SCHEMA, PERSON)).start()
    chooser = random.Random(seed)
    for _ in range(25):
        bits = int.from_bytes(matcher.mask(), "little")
        allowed = [token for token in range(TOKENIZER.vocab_size) if bits >> token & 1]
        assert allowed == [token for token in range(TOKENIZER.vocab_size) if matcher.allows(token)]
        assert len(matcher.mask()) == ROWS // 8
        forced = list(matcher.forced())
        if forced:
            assert allowed == forced[:1]
        token = chooser.choice(allowed)
        if token == END:
            break
        matcher.take(token)
        if matcher.is_over:
            break


SHAPES = {
    "schema": asked(GrammarKind.JSON_SCHEMA, PERSON),
    "array": asked(
        GrammarKind.JSON_SCHEMA, {"type": "array", "items": {"enum": [True, "name", 7]}, "maxItems": 9}
    ),
    "choice": asked(GrammarKind.CHOICE, ["name of it", "name  of it", "names"]),
    "expression": asked(GrammarKind.REGEX, "(na|me){2}age( {3}b){1,9}"),
}


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_many_tokens_at_once_are_taken_as_one_at_a_time(shape: str, seed: int) -> None:
    chooser = random.Random(seed)
    drawn = [*TOKENIZER.encode_plain(write(SHAPES[shape], seed)), END, 7, 8]
    for _ in range(chooser.randrange(3)):
        drawn[chooser.randrange(len(drawn))] = chooser.randrange(ROWS)
    grammar = GRAMMARS.compile(SHAPES[shape])
    slow, fast, start = grammar.start(), grammar.start(), 0
    while start < len(drawn):
        run = drawn[start : start + chooser.randrange(1, 9)]
        num_taken = Matcher.take_many(slow, run)
        assert fast.take_many(run) == num_taken
        assert (fast.is_over, fast.is_stuck, fast.mask()) == (slow.is_over, slow.is_stuck, slow.mask())
        assert fast.forced() == slow.forced()
        start += num_taken
        if num_taken < len(run):
            break


@pytest.mark.parametrize("executor", [None, LLExecutor(2)])
def test_masks_that_are_made_together_are_those_of_each(executor: LLExecutor | None) -> None:
    allowed = AllowedTokens(frozenset((5, 300)), ROWS)
    matchers: list[Matcher] = [GRAMMARS.compile(wanted).start() for wanted in SHAPES.values()] + [allowed]
    for matcher, token in zip(matchers, TOKENIZER.encode_plain('{["n')):
        if matcher.allows(token):
            matcher.take(token)
    words = np.zeros((len(matchers) + 1, ROWS // 32), np.uint32)
    fill_masks(words, matchers, executor)
    assert [row.tobytes() for row in words[:-1]] == [matcher.mask() for matcher in matchers]
    assert not words[-1].any()


def test_a_text_may_end_only_where_it_is_complete() -> None:
    matcher = GRAMMARS.compile(asked(GrammarKind.REGEX, "ab?")).start()
    assert not matcher.allows(END)
    matcher.take(TOKENIZER.encode_plain("a")[0])
    assert matcher.allows(END) and matcher.ends_with(END) and not matcher.is_over


def test_a_grammar_is_compiled_once() -> None:
    wanted = asked(GrammarKind.REGEX, "only here")
    COMPILED.clear()
    first = GRAMMARS.compile(wanted)
    assert GRAMMARS.compile(wanted) is first
    seconds, repeated = COMPILED
    assert seconds is not None and repeated is None


def test_grammars_are_counted() -> None:
    metrics = Metrics()
    grammars = Grammars(TOKENIZER, ROWS, metrics.note_grammar)
    for _ in range(3):
        grammars.compile(asked(GrammarKind.REGEX, "a+"))
    samples = parse(metrics.render().decode())
    assert samples["levserve_grammar_compiles_total"] == 1
    assert samples["levserve_grammar_cache_hits_total"] == 2
    assert samples["levserve_grammar_compile_seconds_total"] > 0


def test_a_schema_that_is_true_allows_any_json() -> None:
    matcher = GRAMMARS.compile(asked(GrammarKind.JSON_SCHEMA, True)).start()
    for token in TOKENIZER.encode_plain('[1, "x", null]'):
        assert matcher.allows(token)
        matcher.take(token)
    assert matcher.allows(END)


def test_unknown_formats_are_annotations() -> None:
    assert (
        json.loads(
            write(asked(GrammarKind.JSON_SCHEMA, {"type": "string", "format": "binary", "maxLength": 2}), 1)
        )
        is not None
    )


def nested(depth: int) -> Any:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "string"}


def many(count: int, schema: Any) -> Any:
    return {"type": "object", "properties": {f"p{number}": schema for number in range(count)}}


ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
HOPELESS = {"$defs": {"x": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}}}
ALTERNATIVES = {"anyOf": [{"properties": {f"k{number}": {"type": "null"}}} for number in range(4)]}
CHAIN = {
    "$defs": {f"d{number}": {"$ref": f"#/$defs/d{number - 1}"} for number in range(1, 300)}
    | {"d0": {"type": "null"}},
    "$ref": "#/$defs/d299",
}


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, {"not": {"type": "string"}}, 'not supported: "not"'),
        (GrammarKind.JSON_SCHEMA, {"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        (GrammarKind.JSON_SCHEMA, 5, "an object or a boolean"),
        (GrammarKind.JSON_SCHEMA, False, "no text at all"),
        (GrammarKind.JSON_SCHEMA, {"type": "strin"}, "strin"),
        (GrammarKind.JSON_SCHEMA, {"enum": 5}, ""),
        (GrammarKind.JSON_SCHEMA, {"$ref": "https://example.com/schema"}, "example.com"),
        (GrammarKind.JSON_SCHEMA, {"$ref": "#"}, "never end"),
        (GrammarKind.JSON_SCHEMA, ITSELF, "never end"),
        (
            GrammarKind.JSON_SCHEMA,
            {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]} | HOPELESS,
            "never end",
        ),
        (GrammarKind.JSON_SCHEMA, nested(100), "levels"),
        (GrammarKind.JSON_SCHEMA, many(500, {"type": "null"}), "more than 500 schemas"),
        (GrammarKind.JSON_SCHEMA, many(101, {"type": "string", "pattern": "a+"}), "more than 100 patterns"),
        (GrammarKind.JSON_SCHEMA, {"enum": list(range(1001))}, "more than 1000 values"),
        (GrammarKind.JSON_SCHEMA, {"allOf": [ALTERNATIVES] * 6}, "combinations"),
        (GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "(?=a)b"}, ""),
        (GrammarKind.REGEX, "a(b", "regex"),
        (GrammarKind.REGEX, "x" * 70_000, "65536"),
        (GrammarKind.CHOICE, [str(number) for number in range(1001)], "1000"),
        (GrammarKind.GRAMMAR, "root ::= nowhere", "nowhere"),
        (GrammarKind.GRAMMAR, "start: unknown_rule", "unknown_rule"),
    ],
)
def test_what_cannot_be_held_is_refused_with_the_field_and_the_reason(
    kind: GrammarKind, value: Any, reason: str
) -> None:
    with pytest.raises(BadRequest) as refusal:
        GRAMMARS.compile(asked(kind, value))
    assert refusal.value.param == "field"
    assert reason in refusal.value.message
    assert not any(sign in refusal.value.message for sign in ("\n", "1 |", "%llguidance"))


def test_references_in_either_order_are_followed_to_their_end() -> None:
    reverse = CHAIN | {"$defs": dict(reversed(CHAIN["$defs"].items()))}
    for schema in (CHAIN, reverse):
        assert write(asked(GrammarKind.JSON_SCHEMA, schema), 1) == "null"


def test_a_row_of_the_model_that_is_no_token_does_not_fit_and_does_no_harm() -> None:
    matcher = GRAMMARS.compile(asked(GrammarKind.REGEX, "ab")).start()
    assert not matcher.allows(TOKENIZER.vocab_size)
    assert not matcher.allows(ROWS - 1)
    assert not matcher.is_stuck and matcher.forced()


KEYWORDS = (
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "properties", "required", "items"),
    *("additionalProperties", "patternProperties", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    *("minLength", "maxLength", "pattern", "format", "minimum", "maximum", "multipleOf", "not", "if", "then"),
    *("dependentRequired", "propertyNames", "minProperties", "contains", "title", "default", "x-unknown"),
)
ODD = ([], {}, 5, None, True, "x", -1, [5], {"a": 5}, [[]], [None], {"a": None}, "#/$defs/x", "#", [{}])


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_an_odd_value_in_a_schema_is_a_mistake_at_most(keyword: str) -> None:
    for value in ODD:
        odd: dict[str, Any] = {keyword: value}
        for schema in (odd, {"type": "object", "properties": {"a": odd}}, {"type": "object"} | odd):
            tool = Tool("f", None, schema, "tools[0]")
            with suppress(ValueError, BadRequest):
                check_schema(schema)
            with suppress(ValueError, BadRequest):
                arguments_schema(tool)
            with suppress(ValueError, BadRequest):
                for argument in split_arguments(tool):
                    is_bare(argument.schema)
                    bare_to_json("5", argument.schema)


@pytest.mark.parametrize(
    "shape", [asked(GrammarKind.REGEX, "(?s:.*)x"), asked(GrammarKind.JSON_SCHEMA, PERSON)]
)
def test_an_end_token_is_never_text_even_if_it_is_not_special(shape: GrammarText) -> None:
    tokenizer = make_tokenizer(is_special=False)
    matcher = Grammars(tokenizer, ROWS, COMPILED.append).compile(shape).start()
    matcher.take_many(tokenizer.encode_plain('{"name": "a'))
    bits = int.from_bytes(matcher.mask(), "little")
    (end,) = tokenizer.eos_ids
    assert bits and not bits >> end & 1
    assert all(matcher.allows(token) == bool(bits >> token & 1) for token in range(tokenizer.vocab_size))


@pytest.mark.parametrize("executor", [None, LLExecutor(2)])
def test_a_text_that_must_go_on_with_a_token_that_the_model_has_no_row_for_is_stuck(
    executor: LLExecutor | None,
) -> None:
    tokenizer = make_tokenizer("<far>")
    far = tokenizer.vocab_size - 1
    rows = far // 32 * 32
    choices = asked(GrammarKind.CHOICE, ["a<far>", "b<far>"])
    matcher = Grammars(tokenizer, rows, COMPILED.append).compile(choices).start()
    free = Grammars(tokenizer, rows, COMPILED.append).compile(asked(GrammarKind.REGEX, "[ab]{3}")).start()
    (first,) = tokenizer.encode_plain("a")
    for is_stuck in (False, True):
        words = np.zeros((2, rows // 32), np.uint32)
        fill_masks(words, [matcher, free], executor)
        assert [row.tobytes() for row in words] == [matcher.mask(), free.mask()]
        assert (matcher.is_stuck, words[0].any()) == (is_stuck, not is_stuck)
        matcher.take(first)
        free.take(first)


@pytest.mark.parametrize(
    "rule", [AllowedTokens(frozenset((5, END)), ROWS), BannedWords(frozenset(((7,),)), ROWS)]
)
def test_a_rule_about_tokens_ends_no_text(rule: AllowedTokens | BannedWords) -> None:
    tokens = [5, END, 5]
    assert take_fitting(rule.start(), tokens, frozenset()) == Fit(3, is_end=False)
    assert take_fitting(rule.start(), tokens, frozenset((END,))) == Fit(1, is_end=True)


def test_a_model_without_an_end_token_has_no_grammars() -> None:
    grammars = Grammars(Tokenizer(Vocabulary(TOKENIZER.backend)), ROWS, COMPILED.append)
    with pytest.raises(BadRequest, match="'field' cannot be used: the model has no end token"):
        grammars.compile(asked(GrammarKind.REGEX, "ab"))
