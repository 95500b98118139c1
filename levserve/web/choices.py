"""From a parsed body to the choices that will turn its sequences into text: what is echoed, where they stop, what they show.

Called on HTTP threads, when the body has been checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from levserve.generation import Choice, Echo
from levserve.text.stops import StopStrings
from levserve.text.tokenizer import Tokenizer
from levserve.web.schema import ChatBody, CompletionBody


def make_choices(
    body: ChatBody | CompletionBody, tokenizer: Tokenizer, prompts: Sequence[list[int]]
) -> list[Choice]:
    """One choice for each sequence that `submission.prepare` makes, in the same order."""
    # The text of a completion goes on from its prompt, and so does a continued message; a new message starts afresh.
    continues = isinstance(body, CompletionBody) or body.continue_final_message is True
    skips = body.skip_special_tokens is not False
    choices: list[Choice] = []
    for echo in _echoes(body, tokenizer, prompts):
        first: Choice | None = None
        for _ in range(body.num_sequences):
            choice = Choice(
                tokenizer.detokenizer(skip_special_tokens=skips, continues=continues),
                StopStrings(body.stops, include=body.include_stop_str_in_output is True),
                stop_ids=stop_ids_of(body, tokenizer) if stops_here(body) else frozenset(),
                num_logprobs=body.num_logprobs,
                echo=echo,
                scored_by=first,
            )
            first = first or choice
            choices.append(choice)
    return choices


def stop_ids_of(body: ChatBody | CompletionBody, tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else tokenizer.eos_ids)


def stops_here(body: ChatBody | CompletionBody) -> bool:
    """Whether stop tokens end a choice on this side, where they are listed with their log-probabilities.

    lm-evaluation-harness asks for one token after a scored prompt and drops the last entry of the lists: one must be there
    also if it is a stop token. With `min_tokens` the device must know the stop tokens, to ban them.
    """
    return body.shows_prompt and body.num_logprobs is not None and not body.min_tokens


def _echoes(
    body: ChatBody | CompletionBody, tokenizer: Tokenizer, prompts: Sequence[list[int]]
) -> list[Echo | None]:
    if not isinstance(body, CompletionBody) or not body.echo:
        return [None] * len(prompts)
    skips = body.skip_special_tokens is not False
    return [
        _echo(given, tokens, tokenizer, skips) for given, tokens in zip(body.prompts, prompts, strict=True)
    ]


def _echo(given: str | list[int], tokens: list[int], tokenizer: Tokenizer, skip_special_tokens: bool) -> Echo:
    """The prompt as the client gave it, or its tokens' text.

    The offsets are of the tokens' text in both cases; a tokenizer that rewrites text makes them differ, but never past its end.
    """
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.add((token,)) for token in tokens]
    text = given if isinstance(given, str) else "".join(pieces) + detokenizer.flush()
    starts = itertools.accumulate(map(len, pieces[:-1]), initial=0)
    return Echo(text, tuple(tokens), tuple(min(start, len(text)) for start in starts))
