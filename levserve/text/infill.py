"""Fill in the middle: the prompt with which a model writes what belongs between two texts, most often code.

A model that was trained for this has tokens that mark what comes before, what comes after, and where the
middle begins. They are found in its vocabulary by the names that each family gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from levserve.text.tokenizer import Tokenizer
from levserve.text.tools.families import deepseek_token


class Marks(NamedTuple):
    """One family's tokens. Without a `middle` the suffix comes first, and the middle follows the prefix."""

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()
    """Tokens that end the middle, besides the marks and the model's end tokens."""
    prefix_begins_text: bool = False
    """Whether the prefix gets the space that some tokenizers put before a text; a suffix never does."""


FAMILIES = (
    # Qwen2.5-Coder and its successors, CodeGemma, Granite 4
    Marks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder's tokens, which Granite's code models have too
    Marks(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<reponame>", "<repo_name>", "<filename>"),
    ),
    # DeepSeek-Coder, DeepSeek-V2 and V3
    Marks(deepseek_token("fim begin"), deepseek_token("fim hole"), deepseek_token("fim end"), ("<|EOT|>",)),
    # GLM-4
    Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|endoftext|>", "<|user|>")),
    # Code Llama
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), prefix_begins_text=True),
    # Codestral and Devstral
    Marks("[PREFIX]", "[SUFFIX]", None, ("[MIDDLE]",), prefix_begins_text=True),
)
SPACE = "▁"
"""How vocabularies of SentencePiece spell a space."""
GUARD = "☺"
"""Put before a text to attract the tokenizer's first space; both are then removed."""


@dataclass(frozen=True, slots=True)
class Infill:
    """How one vocabulary fills in the middle."""

    marks: Marks
    ids: dict[str, int]
    """Token ids of the marks and ends that the vocabulary has, by text."""
    tokenizer: Tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the middle."""
        return frozenset(self.ids.values())

    def encode_prefix(self, text: str) -> list[int]:
        """The tokens of the text before the middle; the strings of special tokens in it are ordinary text."""
        begins = self.marks.prefix_begins_text and text and self._spaces(self.tokenizer.encode("a"))
        return self._encode(f" {text}" if begins else text)

    def _encode(self, text: str) -> list[int]:
        """The tokens of a span within a text, without a space added by the tokenizer."""
        tokens = self.tokenizer.encode_plain(text)
        if not self._spaces(self.tokenizer.encode_plain("a")):
            return tokens
        guard = self.tokenizer.encode_plain(GUARD)
        return self.tokenizer.encode_plain(GUARD + text)[len(guard) :]

    def _spaces(self, tokens: Sequence[int]) -> bool:
        """Whether a tokenizer put a space before a letter that became these tokens."""
        return any((self.tokenizer.backend.id_to_token(token) or "").startswith(SPACE) for token in tokens)

    def make_prompt(self, prefix: Sequence[int], suffix: str, *, add_special_tokens: bool) -> list[int]:
        marks, ids = self.marks, self.ids
        before = [ids[marks.prefix], *prefix]
        after = [ids[marks.suffix], *self._encode(suffix)]
        first = self._first() if add_special_tokens else []
        if marks.middle is None:
            return [*first, *after, *before]
        return [*first, *before, *after, ids[marks.middle]]

    def _first(self) -> list[int]:
        """The tokens that begin every text, without the end tokens that a few tokenizers add."""
        tokenizer, tokens = self.tokenizer, self.tokenizer.encode("")
        bos = tokenizer.backend.token_to_id(tokenizer.bos_token or "")
        while tokens and tokens[-1] != bos and tokens[-1] in tokenizer.eos_ids:
            tokens.pop()
        return tokens


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """How a model with this vocabulary fills in the middle; None if it has no tokens for that."""
    for marks in FAMILIES:
        needed = [mark for mark in (marks.prefix, marks.suffix, marks.middle) if mark is not None]
        found = {name: tokenizer.backend.token_to_id(name) for name in (*needed, *marks.ends)}
        ids = {name: token for name, token in found.items() if token is not None}
        if all(mark in ids for mark in needed):
            return Infill(marks, ids, tokenizer)
    return None
