"""What an evaluation scores, in tokens: contexts with continuations, and windows that roll over a text.

The tokens are those that lm-evaluation-harness gets from a Hugging Face model, so that results
are comparable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from levserve.request.truncation import bos_of
from levserve.text.tokenizer import Tokenizer


class Scored(NamedTuple):
    """The tokens from `num_context` on are scored, each given all tokens before it."""

    tokens: tuple[int, ...]
    num_context: int


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns texts into tokens."""

    tokenizer: Tokenizer
    prefix: int
    """The token that is put before a text without a context."""
    adds_bos: bool | None = None
    """Whether the tokenizer adds its special tokens to a text; None: unless it begins with the prefix."""

    def encode(self, text: str) -> list[int]:
        adds = self.adds_bos
        if adds is None:
            prefix = self.tokenizer.token_bytes(self.prefix).decode(errors="replace")
            adds = not prefix or not text.startswith(prefix)
        return self.tokenizer.encode(text, add_special_tokens=adds)

    def encode_pair(self, context: str, continuation: str) -> Scored:
        """Spaces that end the context belong to the continuation, as tokenizers join them to its words."""
        if not context:
            tokens = self.tokenizer.encode(continuation, add_special_tokens=False)
            if tokens[:1] != [self.prefix]:
                tokens = [self.prefix, *tokens]
            return Scored(tuple(tokens), 1)
        stripped = context.rstrip()
        num_context = len(self.encode(stripped))
        return Scored(tuple(self.encode(context + continuation)), num_context)


def find_prefix(tokenizer: Tokenizer) -> int | None:
    """The bos token, or else the token that ends a text; None for a vocabulary without either."""
    bos = bos_of(tokenizer)
    return min(tokenizer.eos_ids, default=None) if bos is None else bos


def cut(scored: Scored, max_tokens: int) -> Scored:
    """Drops the beginning of a pair that is too long. At least one token of context stays."""
    num_lost = max(len(scored.tokens) - max_tokens, 0)
    return Scored(scored.tokens[num_lost:], max(scored.num_context - num_lost, 1))


def roll(tokens: Sequence[int], prefix: int, max_tokens: int) -> Iterator[Scored]:
    """Windows of at most `max_tokens` that score each token once.

    The first begins with the prefix, and the last is as long as the others: its tokens have all the context
    that fits.
    """
    size = max_tokens - 1
    done = 0
    while done < len(tokens):
        end = min(done + size, len(tokens))
        start = end - size - 1
        if start < 0:
            yield Scored((prefix, *tokens[:end]), 1)
        else:
            yield Scored(tuple(tokens[start:end]), done - start)
        done = end
