"""The last step of a start, and part of every reload: the model scores a fixed text.

Weights that were read wrong give its tokens a mean log-probability near minus the logarithm of the
vocabulary's size. The largest difference between the scores of two sets of weights says how far apart they
are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from levserve.engine.served_model import ServedModel
from levserve.errors import Poisoned, StartupError, Unavailable
from levserve.models.build import Loaded
from levserve.schedule.request import FinishReason, GenerationRequest, Sampling, TokenBatch

TEXT = (
    "The sun rises in the east and sets in the west. "
    "Water boils at one hundred degrees, and two and two are four."
)
MAX_TOKENS = 32  # one small prefill


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """The log-probabilities of the text's tokens after the first."""

    logprobs: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.logprobs) / max(len(self.logprobs), 1)

    def largest_difference(self, other: ProbeScores) -> float:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max((abs(one - another) for one, another in pairs), default=0.0)

    def __str__(self) -> str:
        return f"mean log-probability {self.mean:.3f} over {len(self.logprobs)} tokens of a fixed text"


def probe(loaded: Loaded) -> ProbeScores:
    """Runs the model before any request does, and leaves the prefix cache empty."""
    scheduler, runner = loaded.scheduler, loaded.runner

    def run() -> Iterator[TokenBatch]:
        scheduler.add(probe_request(loaded.model))
        while scheduler.has_work:
            in_flight = runner.dispatch(scheduler.plan())
            for update in scheduler.commit(in_flight.plan, *in_flight.read()):
                yield update.batch

    try:
        scores = gather_scores(run())
    except Poisoned as error:
        raise StartupError(f"the model cannot be served: {error}") from None
    scheduler.forget_prefixes()
    return scores


def gather_scores(batches: Iterable[TokenBatch]) -> ProbeScores:
    """The scores in the batches of the probe's request. Raises `Poisoned` if the model cannot score."""
    logprobs: list[float] = []
    finish = None
    for batch in batches:
        logprobs += [score.logprob for score in batch.prompt_logprobs]
        finish = batch.finish
    if finish is FinishReason.POISONED:
        raise Poisoned("The weights compute values that are not finite.")
    if finish is not FinishReason.LENGTH:
        raise Unavailable("The server stopped while it scored the probe's text.", retry_after_seconds=1.0)
    return ProbeScores(tuple(logprobs))


def probe_request(model: ServedModel) -> GenerationRequest:
    """Scores the text and generates nothing."""
    tokens = model.tokenizer.encode(TEXT)
    if len(set(tokens)) < 8:  # the vocabulary does not know these words
        tokens = [number % model.tokenizer.vocab_size for number in range(3, 3 + MAX_TOKENS)]
    prompt = tuple(tokens[: min(MAX_TOKENS, model.max_seq_len)])
    return GenerationRequest(
        f"probe-{os.urandom(4).hex()}", prompt, 0, Sampling(temperature=0.0, num_logprobs=0), score_from=1
    )
