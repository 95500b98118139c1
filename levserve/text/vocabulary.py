"""What a tokenizer is made of, in whichever form a model came with it."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`eos_ids` are all tokens that end generation; `chat_template` is the model's own."""

    backend: Tokenizer
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    eos_ids: frozenset[int]
    chat_template: str | None
