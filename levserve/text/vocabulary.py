"""What a tokenizer is made of, whichever format it was read from."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`eos_ids` are all tokens that end generation; `chat_template` is None for a model that has none."""

    backend: Tokenizer
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    eos_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
