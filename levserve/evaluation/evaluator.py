"""Answers the three kinds of requests of lm-evaluation-harness with an open model.

Requests are sorted by their tokens, so that those with a common prefix (the choices of a question, the
questions after the same examples) come together and the prefix is computed once. The engine makes the
batches. `harness.py` connects this to the harness; nothing here needs that package.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from levserve.api.model import Model
from levserve.errors import BadRequest
from levserve.evaluation.pairs import Encoder, Scored, cut, find_prefix, roll
from levserve.request.schema import MAX_STOPS

log = logging.getLogger(__name__)

LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING_NAMES = (
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Generation arguments of a task that mean the same as the fields of a request."""
HARMLESS = {"num_beams": 1, "use_cache": True, "return_full_text": False}
"""Arguments that have no effect with these values."""


class Evaluator:
    """Any thread may call its methods, each of which returns its results in the order of the requests."""

    def __init__(
        self,
        model: Model,
        *,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
    ) -> None:
        prefix = find_prefix(model.tokenizer) if prefix_token_id is None else prefix_token_id
        if prefix is None:
            raise BadRequest("The vocabulary has no bos and no eos token; give 'prefix_token_id'.")
        self._model = model
        self._encoder = Encoder(model.tokenizer, prefix, add_bos_token)
        self._max_gen_toks = max_gen_toks

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """How likely each continuation is after its context, and whether it is what greedy decoding gives."""
        return self._score([self._encoder.encode_pair(*pair) for pair in pairs])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """How likely each text is from its first token on, however long it is."""
        windows: list[Scored] = []
        owners: list[int] = []
        for number, text in enumerate(texts):
            tokens = self._encoder.encode(text)
            for window in roll(tokens, self._encoder.prefix, self._model.max_seq_len):
                windows.append(window)
                owners.append(number)
        sums = [0.0] * len(texts)
        for owner, (logprob, _) in zip(owners, self._score(windows), strict=True):
            sums[owner] += logprob
        return sums

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continues each context until one of its stop strings, or the end of its text."""
        groups: dict[str, list[int]] = {}
        for number, (_, arguments) in enumerate(requests):
            groups.setdefault(json.dumps(arguments, sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        for numbers in groups.values():
            found = self._generate([requests[number][0] for number in numbers], requests[numbers[0]][1])
            texts |= dict(zip(numbers, found, strict=True))
        return [texts[number] for number in range(len(requests))]

    def _score(self, pairs: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Equal pairs are computed once; a continuation that adds no tokens counts as certain."""
        fitting = [cut(pair, self._model.max_seq_len) for pair in pairs]
        self._warn_of_cut(sum(one != two for one, two in zip(pairs, fitting, strict=True)), len(pairs))
        wanted = sorted({pair for pair in fitting if pair.num_context < len(pair.tokens)})
        scores = self._model.score(
            (pair.tokens[: pair.num_context], pair.tokens[pair.num_context :]) for pair in wanted
        )
        found = {pair: (score.logprob, score.is_greedy) for pair, score in zip(wanted, scores, strict=True)}
        return [found.get(pair, (0.0, True)) for pair in fitting]

    def _generate(self, contexts: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
        stops, fields = read_arguments(arguments, self._max_gen_toks)
        room = self._model.max_seq_len - fields["max_tokens"]
        if room < 1:
            raise BadRequest(
                f"{fields['max_tokens']} tokens are to be generated, "
                f"and the model takes {self._model.max_seq_len} with the prompt; lower 'max_gen_toks'."
            )
        whole = [tuple(self._encoder.encode(context) or [self._encoder.prefix]) for context in contexts]
        self._warn_of_cut(sum(len(prompt) > room for prompt in whole), len(whole))
        prompts = [prompt[-room:] for prompt in whole]
        order = sorted(range(len(prompts)), key=lambda number: prompts[number])
        results = self._model.generate([prompts[number] for number in order], **fields)
        texts = {number: cut_at(result.text, stops) for number, result in zip(order, results, strict=True)}
        return [texts[number] for number in range(len(prompts))]

    def _warn_of_cut(self, num_cut: int, count: int) -> None:
        if num_cut:
            log.warning(
                "%d of %d contexts lost their beginning: the model takes %d tokens",
                num_cut,
                count,
                self._model.max_seq_len,
            )


def read_arguments(arguments: Mapping[str, Any], max_gen_toks: int) -> tuple[list[str], dict[str, Any]]:
    """The stop strings and the request fields that a task's generation arguments ask for."""
    given = dict(arguments)
    until = given.pop("until", None) or []
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    limits = [value for name in LIMIT_NAMES if (value := given.pop(name, None)) is not None]
    is_sampled = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", None) or 0.0)
    fields: dict[str, Any] = {
        "max_tokens": int(limits[0]) if limits else max_gen_toks,
        "temperature": 0.0 if is_sampled is False else temperature,
        "stop": stops[:MAX_STOPS],  # the finished text is cut at the others
    }
    for name, value in given.items():
        if name in SAMPLING_NAMES:
            fields[name] = value
        elif name not in HARMLESS or HARMLESS[name] != value:
            raise BadRequest(
                f"A task asks for {name}={value!r}, which levserve does not support.", param=name
            )
    return stops, fields


def cut_at(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.partition(stop)[0]
    return text
