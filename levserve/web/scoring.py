"""The scoring endpoint, /loglikelihood: how likely is each continuation after its prompt.

The view runs on HTTP threads. Nothing is generated: the device computes each prompt with its continuation
once and returns the log-probabilities of the continuation's tokens. Continuations of the same prompt share it
through the prefix cache.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from flask import Blueprint, Response
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest, ContextTooLong
from levserve.request.schema import Priority, PromptLimit, Seconds, check_prompt_limit
from levserve.request.submission import check_length
from levserve.request.truncation import Truncation, bos_of, keep_last
from levserve.schedule.request import GenerationRequest, Sampling, TokenLogprob
from levserve.text.tokenizer import Tokenizer
from levserve.web.call import Calls
from levserve.web.json_body import json_response
from levserve.web.logprobs import clamp, show_token

MAX_PAIRS = 2048


class ScoreBody(Struct, frozen=True, kw_only=True):
    """The body of /loglikelihood. `details` adds the tokens, and whether they were the likeliest."""

    prompts: Annotated[list[str], Meta(min_length=1, max_length=MAX_PAIRS)]
    continuations: Annotated[list[str], Meta(min_length=1, max_length=MAX_PAIRS)]
    model: str | None = None
    details: bool | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    timeout: Seconds | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        check_prompt_limit(self.truncate_prompt_tokens)
        if len(self.prompts) != len(self.continuations):
            raise BadRequest(
                f"'prompts' has {len(self.prompts)} entries and 'continuations' {len(self.continuations)}; "
                "each continuation needs its prompt.",
                param="continuations",
            )


class Scores(Struct, frozen=True):
    """Parallel lists with one entry per pair; `ll` is the sum of the continuation's `token_logprobs`."""

    ll: list[float]
    is_greedy: list[bool] | UnsetType = UNSET
    tokens: list[list[str]] | UnsetType = UNSET
    token_logprobs: list[list[float]] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class Pair(NamedTuple):
    """The tokens of a prompt and its continuation, and how many of them are the prompt's."""

    tokens: list[int]
    num_context: int


def scoring_routes(calls: Calls) -> Blueprint:
    routes = Blueprint("scoring", __name__)

    @routes.post("/loglikelihood")
    def score() -> Response:
        with calls.begin() as call:
            body = call.read(ScoreBody)
            model = call.get_model(body.model)
            truncation = call.truncation(body.truncate_prompt_tokens, model)
            pairs = _make_pairs(body, model, truncation)
            sampling = Sampling(num_logprobs=1 if body.details else 0)
            requests = [
                GenerationRequest(
                    f"{call.engine_id}-{index}",
                    tuple(pair.tokens),
                    0,
                    sampling,
                    deadline=call.deadline,
                    score_from=pair.num_context,
                    priority=body.priority or 0,
                )
                for index, pair in enumerate(pairs)
            ]
            choices = call.compute(requests, model)
        scores = [choice.prompt_logprobs for choice in choices]
        shown = _show(pairs, scores, model.tokenizer, with_details=body.details is True)
        warnings = truncation.warnings("prompts", model.max_seq_len)
        return json_response(structs.replace(shown, warnings=warnings or UNSET))

    return routes


def split_pair(prompt: str, continuation: str, tokenizer: Tokenizer) -> Pair:
    """Tokenizes a pair as lm-evaluation-harness does.

    Spaces at the end of the prompt move to the continuation, where tokenizers keep them. The two are
    tokenized together; the tokens after as many as the prompt has alone are the continuation's. A bos token
    stands for an empty prompt.
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


def _make_pairs(body: ScoreBody, model: ServedModel, truncation: Truncation) -> list[Pair]:
    pairs = []
    for index, (prompt, continuation) in enumerate(zip(body.prompts, body.continuations, strict=True)):
        if not truncation:
            check_length(len(prompt) + len(continuation), model, f"prompts[{index}]")
        pair = split_pair(prompt, continuation, model.tokenizer)
        if len(pair.tokens) <= pair.num_context:
            param = f"continuations[{index}]"
            raise BadRequest(f"'{param}' has no tokens of its own after its prompt.", param=param)
        if truncation:
            pair = _cut(pair, index, model, truncation)
        if len(pair.tokens) > model.max_seq_len:
            raise ContextTooLong(len(pair.tokens), 0, model.max_seq_len, param=f"prompts[{index}]")
        pairs.append(pair)
    return pairs


def _cut(pair: Pair, index: int, model: ServedModel, truncation: Truncation) -> Pair:
    """The pair without the beginning of its prompt; a continuation stays whole and follows some token."""
    num_scored = len(pair.tokens) - pair.num_context
    kept = truncation.num_kept(len(pair.tokens), model.max_seq_len)
    if num_scored < kept:
        return Pair(keep_last(pair.tokens, kept, bos_of(model.tokenizer)), kept - num_scored)
    if truncation.asked is not None and kept == truncation.asked:
        raise BadRequest(
            f"'truncate_prompt_tokens' keeps {kept} tokens, but 'continuations[{index}]' has {num_scored} "
            "and needs one more before it.",
            param="truncate_prompt_tokens",
        )
    raise ContextTooLong(len(pair.tokens), 0, model.max_seq_len, param=f"continuations[{index}]")


def _show(
    pairs: list[Pair], scores: list[tuple[TokenLogprob, ...]], tokenizer: Tokenizer, *, with_details: bool
) -> Scores:
    logprobs = [[clamp(score.logprob) for score in continuation] for continuation in scores]
    sums = [sum(values) for values in logprobs]
    if not with_details:
        return Scores(sums)
    is_greedy = [all(score.logprob >= score.top[0][1] for score in continuation) for continuation in scores]
    tokens = [[show_token(token, tokenizer) for token in pair.tokens[pair.num_context :]] for pair in pairs]
    return Scores(sums, is_greedy, tokens, logprobs)
