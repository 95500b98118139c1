"""The endpoint that scores: how likely is each continuation after its prompt.

Views run on HTTP threads. Nothing is generated: the device computes each prompt with its continuation once and tells the
log-probabilities of the continuation's tokens. Continuations of one prompt find it in the prefix cache.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, NamedTuple

import msgspec
from flask import Blueprint, Response, g, request
from msgspec import UNSET, Meta, Struct, UnsetType

from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest, ContextTooLong
from levserve.schedule.request import GenerationRequest, Sampling, TokenLogprob
from levserve.settings.settings import Settings
from levserve.text.tokenizer import Tokenizer
from levserve.web.admit import admit, asked_timeout
from levserve.web.body import read_body
from levserve.web.json_body import decode
from levserve.web.logprobs import clamp, show_token
from levserve.web.run import Runs
from levserve.web.schema import Seconds
from levserve.web.submission import check_length

MAX_PAIRS = 2048


class ScoreBody(Struct, frozen=True, kw_only=True):
    """The body of /loglikelihood. With `details` the answer tells each token, and whether it was the likeliest."""

    prompts: Annotated[list[str], Meta(min_length=1, max_length=MAX_PAIRS)]
    continuations: Annotated[list[str], Meta(min_length=1, max_length=MAX_PAIRS)]
    model: str | None = None
    details: bool | None = None
    timeout: Seconds | None = None

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.continuations):
            message = f"'prompts' has {len(self.prompts)} entries and 'continuations' {len(self.continuations)}; they are pairs."
            raise BadRequest(message, param="continuations")


class Scores(Struct, frozen=True):
    """Parallel lists, one entry a pair; `ll` is the sum of the continuation's `token_logprobs`."""

    ll: list[float]
    is_greedy: list[bool] | UnsetType = UNSET
    tokens: list[list[str]] | UnsetType = UNSET
    token_logprobs: list[list[float]] | UnsetType = UNSET


class Pair(NamedTuple):
    """The tokens of a prompt and its continuation, and how many of them are the prompt's."""

    tokens: list[int]
    num_context: int


class Scoring:
    """The view of /loglikelihood; shared by all HTTP threads and without state of any one request."""

    def __init__(self, engine: Engine, settings: Settings, runs: Runs) -> None:
        self._engine = engine
        self._settings = settings
        self._runs = runs

    def routes(self) -> Blueprint:
        routes = Blueprint("scoring", __name__)
        routes.add_url_rule("/loglikelihood", view_func=self.score, methods=["POST"])
        return routes

    def score(self) -> Response:
        with ExitStack() as held:
            reservation = held.enter_context(admit(self._engine))
            body = decode(read_body(self._settings.max_body_bytes), ScoreBody)
            client = request.environ.get("gunicorn.socket")
            engine_id, deadline = (
                self._runs.new_id(g.request_id),
                self._runs.deadline(g.started, asked_timeout(), body.timeout),
            )
            model = self._runs.borrow(body.model, held, deadline, client)
            pairs = _make_pairs(body, model)
            sampling = Sampling(num_logprobs=1 if body.details else 0)
            requests = [
                GenerationRequest(
                    f"{engine_id}-{index}",
                    tuple(pair.tokens),
                    0,
                    sampling,
                    deadline=deadline,
                    score_from=pair.num_context,
                )
                for index, pair in enumerate(pairs)
            ]
            choices = self._runs.compute(requests, model, reservation, g.record, client)
        scores = _tell(
            pairs,
            [choice.prompt_logprobs for choice in choices],
            model.tokenizer,
            with_details=body.details is True,
        )
        return Response(msgspec.json.encode(scores), content_type="application/json")


def split_pair(prompt: str, continuation: str, tokenizer: Tokenizer) -> Pair:
    """Tokenizes a pair as lm-evaluation-harness does.

    Spaces at the end of the prompt go to the continuation, where tokenizers keep them. The two are tokenized together; what is
    left after as many tokens as the prompt has alone is the continuation's. After an empty prompt comes the bos token.
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


def _make_pairs(body: ScoreBody, model: ServedModel) -> list[Pair]:
    pairs = []
    for index, (prompt, continuation) in enumerate(zip(body.prompts, body.continuations, strict=True)):
        check_length(len(prompt) + len(continuation), model, f"prompts[{index}]")
        pair = split_pair(prompt, continuation, model.tokenizer)
        if len(pair.tokens) <= pair.num_context:
            param = f"continuations[{index}]"
            raise BadRequest(f"'{param}' has no tokens of its own after its prompt.", param=param)
        if len(pair.tokens) > model.max_seq_len:
            raise ContextTooLong(len(pair.tokens), 0, model.max_seq_len, param=f"prompts[{index}]")
        pairs.append(pair)
    return pairs


def _tell(
    pairs: list[Pair], scores: list[tuple[TokenLogprob, ...]], tokenizer: Tokenizer, *, with_details: bool
) -> Scores:
    logprobs = [[clamp(score.logprob) for score in continuation] for continuation in scores]
    sums = [sum(values) for values in logprobs]
    if not with_details:
        return Scores(sums)
    is_greedy = [all(score.logprob >= score.top[0][1] for score in continuation) for continuation in scores]
    tokens = [[show_token(token, tokenizer) for token in pair.tokens[pair.num_context :]] for pair in pairs]
    return Scores(sums, is_greedy, tokens, logprobs)
