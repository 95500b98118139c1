"""Makes jobs from bodies, pairs to score and texts to embed, as the server's endpoints do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from levserve.api.fields import EmbedFields, ScoreFields
from levserve.api.results import Result, Score, Usage, make_choice
from levserve.api.work import Job
from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest, ContextTooLong
from levserve.generation import Choice, Delta, join_deltas
from levserve.request.choices import rank_choices
from levserve.request.pairs import make_pairs
from levserve.request.policy import Policy
from levserve.request.pooling import make_vector
from levserve.request.schema import GenerationBody
from levserve.request.submission import Seeds, count_reserved, encode_text, prepare
from levserve.request.truncation import Truncation
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.settings.settings import Settings
from levserve.text.stops import StopStrings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pair = tuple[str | list[int], str | list[int]]
"""A prompt and its continuation."""


class Jobs:
    """Any thread may call its methods; making a job takes as long as tokenizing does."""

    def __init__(self, model: ServedModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._policy = Policy.of(settings)
        self._seeds = Seeds(settings.seed)
        self._numbers = itertools.count()
        # The default is meant for a server's clients. A program has no time limit unless it sets one.
        is_given = "request_timeout" in settings.sources
        self._most_seconds = settings.request_timeout if is_given else 0.0

    def generate(self, body: GenerationBody, number: int = 0) -> Job[Result]:
        """The job for prompt `number` of a list; its seeds are those of one request with the whole list."""
        allowed, warnings = self._policy.apply_to(body)
        if allowed.seed is not None:
            allowed = structs.replace(allowed, seed=allowed.seed + number * allowed.num_sequences)
        deadline = self._deadline(allowed.timeout)
        prompts, requests, choices, cuts = prepare(
            allowed, self._model, self._seeds, self._name(), deadline, self._policy
        )
        (prompt,) = prompts
        told = (*warnings, *cuts)

        def finish(gathered: Sequence[Sequence[Delta]]) -> Result:
            return _make_result(allowed, prompt, choices, gathered, told)

        return Job(requests, choices, count_reserved(requests, allowed, self._model), finish, told)

    def score(self, given: Pair, fields: ScoreFields, number: int = 0) -> Job[Score]:
        """The job for pair `number` of a list."""
        prompt, continuation = given
        truncation = Truncation(fields.truncate_prompt_tokens, self._policy.truncates_prompts)
        (pair,) = make_pairs([prompt], [continuation], self._model, truncation, first=number)
        scored = tuple(pair.tokens[pair.num_context :])
        request = GenerationRequest(
            self._name(),
            tuple(pair.tokens),
            0,
            Sampling(num_logprobs=1),
            deadline=self._deadline(fields.timeout),
            score_from=pair.num_context,
            priority=fields.priority or 0,
        )
        choice = Choice(self._model.tokenizer.detokenizer(), StopStrings(()))

        def finish(gathered: Sequence[Sequence[Delta]]) -> Score:
            found = choice.prompt_logprobs
            logprobs = tuple(one.logprob for one in found)
            is_greedy = all(one.logprob >= one.top[0][1] for one in found)
            return Score(sum(logprobs), is_greedy, scored, logprobs)

        return Job([request], [choice], len(pair.tokens), finish)

    def embed(self, text: str | list[int], fields: EmbedFields) -> Job[npt.NDArray[np.float32]]:
        adds_special = fields.add_special_tokens is not False
        tokens = encode_text(text, self._model, "texts", add_special_tokens=adds_special)
        if not tokens:
            raise BadRequest("A text has no tokens.", param="texts")
        if len(tokens) > self._model.max_seq_len:
            raise ContextTooLong(len(tokens), 0, self._model.max_seq_len, param="texts")
        request = GenerationRequest(
            self._name(),
            tuple(tokens),
            0,
            deadline=self._deadline(fields.timeout),
            wants_hidden=True,
            priority=fields.priority or 0,
        )
        choice = Choice(self._model.tokenizer.detokenizer(), StopStrings(()))

        def finish(gathered: Sequence[Sequence[Delta]]) -> npt.NDArray[np.float32]:
            return make_vector(choice, fields.pooling)

        return Job([request], [choice], len(tokens), finish)

    def _name(self) -> str:
        return f"api.{next(self._numbers)}"

    def _deadline(self, timeout: float | None) -> float | None:
        limits = [seconds for seconds in (timeout, self._most_seconds) if seconds]
        return time.monotonic() + min(limits) if limits else None


def _make_result(
    body: GenerationBody,
    prompt: Sequence[int],
    choices: Sequence[Choice],
    gathered: Sequence[Sequence[Delta]],
    warnings: tuple[str, ...],
) -> Result:
    answered = rank_choices(choices, body.num_sequences, body.num_choices)
    num_completion = sum(choice.num_tokens for choice in choices)
    scores = None if body.prompt_logprobs is None else (None, *choices[0].prompt_logprobs)
    return Result(
        tuple(make_choice(join_deltas(gathered[index])) for index in answered),
        tuple(prompt),
        Usage(len(prompt), num_completion, min(choice.num_cached for choice in choices)),
        scores,
        warnings,
    )
