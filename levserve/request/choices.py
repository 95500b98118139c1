"""Makes the choices that turn sequences into text: what they echo, where they stop, what they show.

Called on HTTP threads, once the body has been checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from levserve.generation import Choice, Echo
from levserve.request.schema import CompletionBody, GenerationBody
from levserve.text.parts import PartReader
from levserve.text.stops import StopStrings
from levserve.text.tokenizer import Tokenizer


def make_choices(
    body: GenerationBody,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    stop_ids: frozenset[int] = frozenset(),
    cut: Sequence[bool] = (),
    make_reader: Callable[[], PartReader | None] = lambda: None,
    visible: frozenset[int] = frozenset(),
) -> list[Choice]:
    """One choice per sequence, prompt-major. `stop_ids` end a choice here, not on the device.

    `cut` says for each prompt whether its beginning was left out. `make_reader` makes the reader that splits
    an answer into parts, and `visible` are the special tokens that the reader has to see.
    """
    skips = body.skip_special_tokens is not False
    choices: list[Choice] = []
    echoes = _echoes(body, tokenizer, prompts, cut or [False] * len(prompts))
    for prompt, echo in zip(prompts, echoes, strict=True):
        first: Choice | None = None
        for _ in range(body.num_sequences):
            choice = Choice(
                tokenizer.detokenizer(
                    skip_special_tokens=skips, continues=body.continues_prompt, visible=visible
                ),
                StopStrings(body.stops, include=body.include_stop_str_in_output is True),
                stop_ids=stop_ids,
                num_logprobs=body.num_logprobs,
                echo=echo,
                scored_by=first,
                num_scores=0 if body.prompt_logprobs is None else len(prompt) - 1,
                reader=make_reader(),
            )
            first = first or choice
            choices.append(choice)
    return choices


def rank_choices(choices: Sequence[Choice], num_run: int, num_kept: int) -> list[int]:
    """The indices of the choices that are in the answer, in its order.

    These are the likeliest `num_kept` of each prompt's `num_run`, likeliest first, or all in their own order.
    """
    if num_run == num_kept:
        return list(range(len(choices)))
    answered: list[int] = []
    for start in range(0, len(choices), num_run):
        group = range(start, start + num_run)
        ranked = sorted(group, key=lambda index: choices[index].mean_logprob, reverse=True)
        answered += ranked[:num_kept]
    return answered


def _echoes(
    body: GenerationBody, tokenizer: Tokenizer, prompts: Sequence[list[int]], cut: Sequence[bool]
) -> list[Echo | None]:
    if not isinstance(body, CompletionBody) or not body.echo:
        return [None] * len(prompts)
    skips = body.skip_special_tokens is not False
    echoes: list[Echo | None] = []
    for given, tokens, is_cut in zip(body.prompts, prompts, cut, strict=True):
        echoes.append(_echo(tokens if is_cut else given, tokens, tokenizer, skips))
    return echoes


def _echo(given: str | list[int], tokens: list[int], tokenizer: Tokenizer, skip_special_tokens: bool) -> Echo:
    """The prompt as the client gave it, or the text of its tokens.

    The offsets count characters of the tokens' text. A tokenizer that rewrites text makes that differ from
    the text shown, so an offset is capped at the end of the latter.
    """
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    texts = [detokenizer.add((token,)) for token in tokens]
    text = given if isinstance(given, str) else "".join(texts) + detokenizer.flush()
    starts = itertools.accumulate(map(len, texts[:-1]), initial=0)
    return Echo(text, tuple(tokens), tuple(min(start, len(text)) for start in starts))
