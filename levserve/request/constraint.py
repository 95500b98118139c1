"""The constraints on a request's text: OpenAI's `response_format`, and the fields of vLLM and llama.cpp.

A schema, expression, list of choices or grammar becomes one `GrammarText`. `strict` changes nothing: every
schema is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta, Struct

from levserve.errors import BadRequest
from levserve.request.decode import missing, require_choice, unsupported
from levserve.schedule.constraint import Constraint
from levserve.text.combined import AllOf
from levserve.text.grammar import GrammarKind, Grammars, GrammarText
from levserve.text.token_rules import AllowedTokens, BannedWords
from levserve.text.tokenizer import Tokenizer

ANY_OBJECT = {"type": "object"}
MAX_WORDS = 100
FORMATS = ("text", "json_object", "json_schema")

Choices = Annotated[list[str], Meta(min_length=1)]


class NamedSchema(Struct, frozen=True):
    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """OpenAI's `response_format`; llama.cpp's clients send a `schema` with the type `json_object`."""

    type: str
    json_schema: NamedSchema | None = None
    schema: Any = None


class StructuredOutputs(Struct, frozen=True):
    """vLLM's field since 0.12. Exactly one kind may be given."""

    json: Any = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None


class ConstraintFields(Struct, frozen=True, kw_only=True):
    """The fields of a body that constrain its text."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    grammar: str | None = None
    json_schema: Any = None
    allowed_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)] | None = None
    bad_words: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=1000)]], Meta(max_length=MAX_WORDS)]
        | None
    ) = None

    def find_grammar(self) -> GrammarText | None:
        """The one grammar that the fields ask for; raises `BadRequest` for two."""
        found = [*self._from_openai(), *self._from_structured(), *self._from_guided(), *self._from_llama()]
        if len(found) > 1:
            first, second = found[0].param, found[1].param
            raise BadRequest(
                f"'{first}' and '{second}' both constrain the text; send one of them.", param=second
            )
        grammar = found[0] if found else None
        return grammar if self.guided_whitespace_pattern is None else self._add_whitespace(grammar)

    def _add_whitespace(self, grammar: GrammarText | None) -> GrammarText:
        """The grammar with `guided_whitespace_pattern`, whichever field the schema came in."""
        param = "guided_whitespace_pattern"
        if grammar is None or grammar.kind is not GrammarKind.JSON_SCHEMA:
            raise BadRequest(f"'{param}' is only allowed with a JSON schema.", param=param)
        if grammar.whitespace is not None:
            raise BadRequest(
                f"'{param}' and 'structured_outputs.whitespace_pattern' exclude each other.", param=param
            )
        return replace(grammar, whitespace=self.guided_whitespace_pattern)

    def _from_openai(self) -> Iterator[GrammarText]:
        asked = self.response_format
        if asked is None:
            return
        require_choice(asked.type, FORMATS, "response_format.type")
        if asked.type == "json_object":
            param = "response_format" if asked.schema is None else "response_format.schema"
            yield _schema(ANY_OBJECT if asked.schema is None else asked.schema, param)
        elif asked.type == "json_schema":
            if asked.json_schema is None:
                raise missing("response_format.json_schema")
            if asked.json_schema.schema is None:
                raise missing("response_format.json_schema.schema")
            yield _schema(asked.json_schema.schema, "response_format.json_schema.schema")

    def _from_structured(self) -> Iterator[GrammarText]:
        asked = self.structured_outputs
        if asked is None:
            return
        if asked.structural_tag is not None:
            raise unsupported("structured_outputs.structural_tag")
        found = [*_from_vllm(asked, "structured_outputs.")]
        if asked.json_object:
            found.append(_schema(ANY_OBJECT, "structured_outputs.json_object", asked.whitespace_pattern))
        if asked.whitespace_pattern is not None and asked.json is None and not asked.json_object:
            param = "structured_outputs.whitespace_pattern"
            raise BadRequest(f"'{param}' is only allowed with json or json_object.", param=param)
        if not found:
            raise BadRequest(
                "'structured_outputs' needs one of json, regex, choice, grammar and json_object.",
                param="structured_outputs",
            )
        yield from found

    def _from_guided(self) -> Iterator[GrammarText]:
        given = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex or None,
            choice=self.guided_choice,
            grammar=self.guided_grammar or None,
        )
        return _from_vllm(given, "guided_")

    def _from_llama(self) -> Iterator[GrammarText]:
        if self.grammar:
            yield GrammarText(GrammarKind.GRAMMAR, self.grammar, "grammar")
        if self.json_schema is not None:
            yield _schema(self.json_schema, "json_schema")


def make_constraint(
    fields: ConstraintFields,
    tokenizer: Tokenizer,
    grammars: Grammars,
    hold_answer: Callable[[Constraint | None], Constraint | None] = lambda content: content,
) -> Constraint | None:
    """Compiles what the fields ask for; raises `BadRequest`.

    A grammar constrains the content; `hold_answer` adds the thoughts before it and the calls that may come
    instead of it. Rules about single tokens constrain all of them.
    """
    constraints: list[Constraint] = []
    asked = fields.find_grammar()
    text = hold_answer(None if asked is None else grammars.compile(asked))
    if text is not None:
        constraints.append(text)
    if fields.allowed_token_ids is not None:
        allowed = frozenset(fields.allowed_token_ids)
        constraints.append(AllowedTokens(allowed, grammars.vocab_rows))
    if fields.bad_words:
        words = frozenset(_spellings(fields.bad_words, tokenizer))
        constraints.append(BannedWords(words, grammars.vocab_rows))
    if len(constraints) < 2:
        return constraints[0] if constraints else None
    return AllOf(constraints)


def _from_vllm(asked: StructuredOutputs, prefix: str) -> Iterator[GrammarText]:
    if asked.json is not None:
        yield _schema(asked.json, f"{prefix}json", asked.whitespace_pattern)
    if asked.regex is not None:
        yield GrammarText(GrammarKind.REGEX, asked.regex, f"{prefix}regex")
    if asked.choice is not None:
        yield GrammarText(GrammarKind.CHOICE, json.dumps(asked.choice), f"{prefix}choice")
    if asked.grammar is not None:
        yield GrammarText(GrammarKind.GRAMMAR, asked.grammar, f"{prefix}grammar")


def _schema(schema: Any, param: str, whitespace: str | None = None) -> GrammarText:
    """The grammar of a schema that is given as an object or as JSON text."""
    if isinstance(schema, str):
        text = schema
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"'{param}' is not JSON: {error}.", param=param) from None
    else:
        text = json.dumps(schema)
    return GrammarText(GrammarKind.JSON_SCHEMA, text, param, whitespace)


def _spellings(words: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Each word as the tokens that spell it at the beginning of a text, and those after a space."""
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            tokens = tokenizer.encode_plain(text)
            if tokens:
                yield tuple(tokens)
