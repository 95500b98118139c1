"""The scores of /loglikelihood: how likely each continuation is after its prompt.

Used on HTTP threads and by batches. Nothing is generated: the device computes each prompt with its
continuation once and returns the log-probabilities of the continuation's tokens. Continuations of the same
prompt share it through the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from levserve.answers.logprobs import clamp, show_token
from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest
from levserve.generation import Choice
from levserve.request.decode import require_choice
from levserve.request.pairs import Pair, make_pairs
from levserve.request.schema import Priority, PromptLimit, Seconds, check_prompt_limit
from levserve.request.truncation import Truncation
from levserve.schedule.request import GenerationRequest, Sampling, TokenLogprob
from levserve.text.tokenizer import Tokenizer

MAX_PAIRS = 2048
ONE_PASS = "one_pass"
MODES = ("chain_rule", ONE_PASS)


class ScoreBody(Struct, frozen=True, kw_only=True):
    """The body of /loglikelihood. `details` adds the tokens, and whether they were the likeliest.

    The default mode is the chain rule: each token is scored given nothing but what precedes it.
    """

    prompts: Annotated[list[str | list[int]], Meta(min_length=1, max_length=MAX_PAIRS)]
    continuations: Annotated[list[str | list[int]], Meta(min_length=1, max_length=MAX_PAIRS)]
    model: str | None = None
    mode: str | None = None
    details: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    timeout: Seconds | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        check_prompt_limit(self.truncate_prompt_tokens)
        if self.mode is not None:
            require_choice(self.mode, MODES, "mode")
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
    prompt_token_ids: list[list[int]] | UnsetType = UNSET
    token_ids: list[list[int]] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """A checked and tokenized body: the sequences that run, and how the answer is made from them."""

    body: ScoreBody
    model: ServedModel
    truncation: Truncation
    pairs: list[Pair]
    requests: list[GenerationRequest]

    def answer(self, choices: Sequence[Choice]) -> Scores:
        scores = [choice.prompt_logprobs for choice in choices]
        shown = _show(self.pairs, scores, self.model.tokenizer, with_details=self.body.details is True)
        warnings = self.truncation.warnings("prompts", self.model.max_seq_len)
        shown = structs.replace(shown, warnings=warnings or UNSET)
        if not self.body.return_token_ids:
            return shown
        contexts = [pair.tokens[: pair.num_context] for pair in self.pairs]
        scored = [pair.tokens[pair.num_context :] for pair in self.pairs]
        return structs.replace(shown, prompt_token_ids=contexts, token_ids=scored)


def prepare_scores(
    body: ScoreBody, model: ServedModel, truncation: Truncation, engine_id: str, deadline: float | None
) -> ScoreWork:
    """Checks the body against the model; raises `BadRequest`."""
    in_one_pass = body.mode == ONE_PASS
    if in_one_pass and not model.has_whole_texts:
        raise BadRequest(
            "'mode' one_pass is for models that read a text in both directions; this one scores by the chain "
            "rule alone.",
            param="mode",
        )
    pairs = make_pairs(body.prompts, body.continuations, model, truncation, in_one_pass=in_one_pass)
    sampling = Sampling(num_logprobs=1 if body.details else 0)
    requests = [
        GenerationRequest(
            f"{engine_id}-{index}",
            tuple(pair.tokens),
            0,
            sampling,
            deadline=deadline,
            score_from=pair.num_context,
            scores_in_one_pass=in_one_pass,
            priority=body.priority or 0,
        )
        for index, pair in enumerate(pairs)
    ]
    return ScoreWork(body, model, truncation, pairs, requests)


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
