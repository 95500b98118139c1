"""Cuts prompts from the left, where the client or the operator prefers that to a refusal.

A client asks with vLLM's `truncate_prompt_tokens`: k keeps the last k tokens, -1 as many as fit. The operator
asks for all requests with `--truncate-prompts`, and then the answer's `warnings` say what was left out. Used
on HTTP threads, between tokenizing and checking the length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from levserve.text.tokenizer import Tokenizer

ALL_THAT_FIT = -1


@dataclass(slots=True)
class Truncation:
    """How one request's prompts are cut, and how many tokens were cut without the client asking for it."""

    asked: int | None
    """The request's `truncate_prompt_tokens`."""
    is_automatic: bool
    """Whether prompts that do not fit are cut although the request does not ask for it."""
    num_lost: int = field(default=0, init=False)

    def __bool__(self) -> bool:
        """Whether any prompt can be cut."""
        return self.asked is not None or self.is_automatic

    def num_kept(self, num_tokens: int, max_tokens: int, cut_to: int | None = None) -> int:
        """How many of a prompt's tokens stay, where `max_tokens` fit.

        A prompt that does not fit is cut to `cut_to`, which is `max_tokens` unless it is given.
        """
        kept = num_tokens
        if self.asked is not None and self.asked != ALL_THAT_FIT:
            kept = min(kept, self.asked)
        fitting = max_tokens if cut_to is None else cut_to
        if kept <= max_tokens or fitting < 1:
            return kept  # a prompt without any room is refused later, with the numbers
        if self.asked == ALL_THAT_FIT:
            return fitting
        if self.is_automatic:
            self.num_lost += kept - fitting
            return fitting
        return kept

    def warnings(self, param: str, max_seq_len: int) -> list[str]:
        if not self.num_lost:
            return []
        return [
            f"'{param}' did not fit this model's {max_seq_len} tokens; "
            f"the first {self.num_lost} were left out."
        ]


def keep_last(tokens: list[int], count: int, bos: int | None = None) -> list[int]:
    """The last `count` tokens. A `bos` at the beginning is kept and counted: some models need it."""
    if count >= len(tokens):
        return tokens
    if bos is not None and tokens[0] == bos and count > 1:
        return [bos, *tokens[len(tokens) - count + 1 :]]
    return tokens[len(tokens) - count :]


def bos_of(tokenizer: Tokenizer) -> int | None:
    return None if tokenizer.bos_token is None else tokenizer.backend.token_to_id(tokenizer.bos_token)
