"""Constrains generated text by a JSON schema, a regular expression, a list of choices or a grammar.

llguidance does the work. Its table of the vocabulary takes up to two seconds to make and holds the GIL all
the while, so it is made while the model is loaded. HTTP threads compile grammars, which releases the GIL;
the device thread follows each sequence with its own matcher.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from levserve.errors import BadRequest
from levserve.text.grammar_matcher import GrammarMatcher
from levserve.text.json_schema import check_schema
from levserve.text.lark import SEPARATORS, quote_regex
from levserve.text.tokenizer import Tokenizer

MAX_CHARS = 65_536
"""The longest schema, expression or grammar; enough for the largest schemas that people send."""
MAX_CHOICES = 1000
ASCII_CLASSES = "d"
"""Classes of regular expressions limited to ASCII: a digit is one of ten, as in a JSON schema, not of 700."""
NUM_KEPT = 64
"""Compiled grammars that are kept for the next request with the same text."""
NUM_ENCODED, MAX_ENCODED = 4096, 256
"""Forced texts that are cached with their tokens, and the longest one in characters; 1 or 2 MB in all."""
LIMITS = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=50_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""At most a few milliseconds of work for a token, even late in the text of an ambiguous grammar, and a few
dozen megabytes; usual grammars take a hundredth of that."""


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of strings."""
    GRAMMAR = "grammar"
    """Lark, or the GBNF of llama.cpp."""


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A constraint as a request asks for it; `param` is the field that it came in, for errors."""

    kind: GrammarKind
    text: str
    param: str
    whitespace: str | None = None
    """For a JSON schema: a regular expression for the white space that may stand between its parts."""


class Grammars:
    """The grammars of one model. Any thread may call it.

    `on_compile` gets the seconds that a compilation took, or None if the grammar was found in the cache.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_rows: int, on_compile: Callable[[float | None], None]
    ) -> None:
        self.vocab_rows = vocab_rows
        self._eos_ids = tokenizer.eos_ids
        self._num_tokens = tokenizer.vocab_size
        self._table: LLTokenizer | None = None  # llguidance refuses a vocabulary without an end token
        if tokenizer.eos_ids:
            ends = sorted(tokenizer.eos_ids)
            self._table = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=ends)
        self._kept: OrderedDict[GrammarText, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._on_compile = on_compile

    def compile(self, asked: GrammarText) -> Grammar:
        """Raises `BadRequest` for a text that is not a grammar, is too costly, or allows no text at all."""
        with self._lock:
            found = self._kept.get(asked)
            if found is not None:
                self._kept.move_to_end(asked)
        if found is not None:
            self._on_compile(None)
            return found
        start = time.monotonic()
        grammar = Grammar(self._compile(asked), self._eos_ids, self._num_tokens, self.vocab_rows)
        self._on_compile(time.monotonic() - start)
        with self._lock:
            self._kept[asked] = grammar
            while len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _compile(self, asked: GrammarText) -> LLMatcher:
        if len(asked.text) > MAX_CHARS:
            raise _refusal(asked, f"it has {len(asked.text)} characters; at most {MAX_CHARS} are allowed")
        if self._table is None:
            raise _refusal(asked, "the model has no end token, and a constrained text could not end")
        try:
            source = _source(asked)
        except (ValueError, RecursionError) as error:
            raise _refusal(asked, str(error)) from None
        matcher = LLMatcher(self._table, source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some impossible grammars are found only here
        if matcher.is_error():
            raise _refusal(asked, _explain(matcher.get_error()))
        return matcher


class Grammar:
    """A compiled grammar, before its first token. Sequences share it, each with its own matcher."""

    def __init__(
        self, pristine: LLMatcher, eos_ids: frozenset[int], num_tokens: int, vocab_rows: int
    ) -> None:
        self._pristine = pristine
        self._eos_ids = eos_ids
        self._num_tokens = num_tokens
        self._vocab_rows = vocab_rows

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self._pristine.deep_copy(), self._eos_ids, self._num_tokens, self._vocab_rows)


class _Vocabulary:
    """The interface through which llguidance sees a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder()
        self.eos_token_id = min(tokenizer.eos_ids, default=None)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        special = {token for token, entry in added.items() if entry.special}
        self.special_token_ids = sorted(special | tokenizer.eos_ids)  # an end token is never text
        self._encode = tokenizer.encode_plain
        self._encode_again = functools.lru_cache(NUM_ENCODED)(tokenizer.encode_plain)

    def __call__(self, text: str) -> list[int]:
        """Called by a matcher wherever text is forced, mostly with texts that were forced often before."""
        return self._encode_again(text) if len(text) <= MAX_ENCODED else self._encode(text)


def _source(asked: GrammarText) -> str:
    """The grammar in llguidance's own form; raises ValueError."""
    match asked.kind:
        case GrammarKind.JSON_SCHEMA:
            return _schema_source(json.dumps(check_schema(json.loads(asked.text))), asked.whitespace)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(asked.text, ASCII_CLASSES)}/")
        case GrammarKind.CHOICE:
            choices = json.loads(asked.text)
            if len(choices) > MAX_CHOICES:
                raise ValueError(f"it has {len(choices)} choices; at most {MAX_CHOICES} are allowed")
            return LLMatcher.grammar_from_regex("|".join(map(quote_regex, choices)))
        case GrammarKind.GRAMMAR:
            return llguidance.grammar_from("grammar", asked.text)


def _schema_source(schema: str, whitespace: str | None) -> str:
    if whitespace is None:
        return LLMatcher.grammar_from_json_schema(schema, overrides=SEPARATORS)
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": whitespace})


def _refusal(asked: GrammarText, reason: str) -> BadRequest:
    return BadRequest(f"'{asked.param}' cannot be used: {reason}.", param=asked.param)


def _explain(error: str) -> str:
    """llguidance's message in one line, without what it says about its own state."""
    if error.startswith("panic"):
        return "it is too complex"
    if error.startswith("NoExtension"):
        return "it allows no text at all"
    if found := re.match(r"Unimplemented keys: \[(.*)\]", error):
        return f"these keywords are not supported: {found[1]}"
    if "coerce_one_of" in error:
        return "the schemas of a 'oneOf' may overlap; use 'anyOf'"
    told = re.split(r"\n *1 \| ", error)[0]  # the grammar, line by line, comes after it
    told = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", told)
    words = told.partition("<")[0].split()
    return " ".join(words).rstrip(".")[:300]
