"""What HTTP threads need to know of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass

from levserve.text.grammar import Grammars
from levserve.text.reasoning import Reasoning
from levserve.text.tokenizer import Tokenizer
from levserve.text.tools.model_tools import ModelTools


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Made when the model is ready to run."""

    name: str
    tokenizer: Tokenizer
    max_seq_len: int
    hidden_size: int
    created: int
    grammars: Grammars
    tools: ModelTools
    """How it is told of tools, and how it calls them."""
    num_rows: int = 0
    """Rows of the model's output matrix, which may be fewer than the tokenizer has tokens; 0: not fewer."""
    has_whole_texts: bool = False
    """Whether every position sees the whole text, also what follows it; then there are two ways to score."""
    reasoning: Reasoning | None = None
    """How it thinks before it answers; None if it does not."""
    max_inflight_tokens: int = 0
    """Tokens of accepted requests that this model can hold; 0: its context length for each request."""
    aliases: tuple[str, ...] = ()
    """Further names that requests may use."""
    root: str = ""
    """The model's own name, whatever it is served as; empty: `name`."""
