"""Prompts and continuations to score: texts, tokenized as lm-evaluation-harness does, or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest, ContextTooLong
from levserve.request.submission import check_length, check_rows, check_token_ids
from levserve.request.truncation import Truncation, bos_of, keep_last
from levserve.text.tokenizer import Tokenizer

Text = str | Sequence[int]
"""A text, or its tokens."""


class Pair(NamedTuple):
    """The tokens of a prompt and its continuation, and how many of them are the prompt's."""

    tokens: list[int]
    num_context: int


def split_pair(prompt: str, continuation: str, tokenizer: Tokenizer) -> Pair:
    """Tokenizes a pair as lm-evaluation-harness does.

    Spaces at the end of the prompt move to the continuation, where tokenizers keep them. The two are
    tokenized together: if the prompt alone has n tokens, those after the first n are the continuation's. A
    BOS token stands for an empty prompt.
    """
    context = prompt.rstrip()
    continuation = prompt[len(context) :] + continuation
    context_tokens = tokenizer.encode(context) if context else []
    if context_tokens:
        return Pair(tokenizer.encode(context + continuation), len(context_tokens))
    if tokenizer.bos_token is None:
        raise BadRequest(
            "An empty prompt needs a bos token, which this model does not have; give each prompt a text.",
            param="prompts",
        )
    bos = tokenizer.encode(tokenizer.bos_token, add_special_tokens=False)
    return Pair(bos + tokenizer.encode(continuation, add_special_tokens=False), len(bos))


def encode_apart(prompt: str, continuation: str, model: ServedModel) -> Pair:
    """Tokenizes a pair as AI-OS's evaluations do: each text alone, without special tokens.

    After an empty prompt, the first token of the continuation is not scored. A prompt that is too long loses
    its beginning.
    """
    context = model.tokenizer.encode(prompt, add_special_tokens=False)
    scored = model.tokenizer.encode(continuation, add_special_tokens=False)
    room = max(model.max_seq_len - len(scored), 0)
    context = context[max(len(context) - room, 0) :]
    return Pair(context + scored, max(len(context), 1))


def make_pairs(
    prompts: Sequence[Text],
    continuations: Sequence[Text],
    model: ServedModel,
    truncation: Truncation,
    *,
    in_one_pass: bool = False,
    first: int = 0,
) -> list[Pair]:
    """The pairs in tokens, checked against the model; raises `BadRequest`.

    `first` is the number that the first pair has in errors.
    """
    pairs = []
    for index, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True), first):
        is_text = isinstance(prompt, str)
        if isinstance(prompt, str) and isinstance(continuation, str):
            if not truncation:
                check_length(len(prompt) + len(continuation), model, f"prompts[{index}]")
            if in_one_pass:
                pair = encode_apart(prompt, continuation, model)
            else:
                pair = split_pair(prompt, continuation, model.tokenizer)
        elif isinstance(prompt, str) or isinstance(continuation, str):
            raise BadRequest(
                "A prompt and its continuation are two texts or two lists of token ids.",
                param=f"continuations[{index}]",
            )
        else:
            pair = _join_pair(prompt, continuation, index, model.tokenizer)
        check_rows(pair.tokens, model, f"prompts[{index}]")
        is_first_alone = in_one_pass and is_text and len(pair.tokens) == 1
        if len(pair.tokens) <= pair.num_context and not is_first_alone:
            param = f"continuations[{index}]"
            raise BadRequest(f"'{param}' has no tokens of its own after its prompt.", param=param)
        if truncation:
            pair = _cut(pair, index, model, truncation, has_bos=is_text)
        if len(pair.tokens) > model.max_seq_len:
            raise ContextTooLong(len(pair.tokens), 0, model.max_seq_len, param=f"prompts[{index}]")
        pairs.append(pair)
    return pairs


def _join_pair(prompt: Sequence[int], continuation: Sequence[int], index: int, tokenizer: Tokenizer) -> Pair:
    check_token_ids(f"prompts[{index}]", prompt, tokenizer)
    check_token_ids(f"continuations[{index}]", continuation, tokenizer)
    if len(prompt) == 0:
        param = f"prompts[{index}]"
        raise BadRequest(f"'{param}' has no tokens; a continuation follows at least one.", param=param)
    return Pair([*prompt, *continuation], len(prompt))


def _cut(pair: Pair, index: int, model: ServedModel, truncation: Truncation, *, has_bos: bool) -> Pair:
    """The pair without the beginning of its prompt; the continuation stays whole and follows a token."""
    num_scored = len(pair.tokens) - pair.num_context
    kept = truncation.num_kept(len(pair.tokens), model.max_seq_len)
    if num_scored < kept:
        bos = bos_of(model.tokenizer) if has_bos else None
        return Pair(keep_last(pair.tokens, kept, bos), kept - num_scored)
    if truncation.asked is not None and kept == truncation.asked:
        raise BadRequest(
            f"'truncate_prompt_tokens' keeps {kept} tokens, but 'continuations[{index}]' has {num_scored} "
            "and needs one more before it.",
            param="truncate_prompt_tokens",
        )
    raise ContextTooLong(len(pair.tokens), 0, model.max_seq_len, param=f"continuations[{index}]")
