"""A parsed request on its way through the engine: started, collected or streamed, and undone on every way out.

Shared by every endpoint that runs the model. Runs on HTTP threads.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from levserve.device.sizing import TOKENS_PER_ROW
from levserve.engine.admission import Reservation
from levserve.engine.served_model import ServedModel
from levserve.generation import Choice, ClientGone, Delta, Deltas
from levserve.models.registry import Registry
from levserve.schedule.request import GenerationRequest
from levserve.settings.settings import Settings
from levserve.text.stops import StopStrings
from levserve.web.answer import Usage, count_usage
from levserve.web.choices import make_choices
from levserve.web.request_log import RequestLog
from levserve.web.schema import ChatBody, CompletionBody
from levserve.web.submission import Defaults, Seeds, prepare
from levserve.web.watcher import Watcher

MAX_SECONDS = 1e6  # who has more than this has no deadline; a wait of 1e10 seconds is an error in Python
WAVE_SHARE = 4  # of the tokens that may be admitted, a wave of prompts takes this part at most


@dataclass(frozen=True, slots=True)
class Run:
    """A request that the engine has: its choices, and their deltas as they come. Belongs to one HTTP thread.

    The choices are prompt-major; `num_kept` of each prompt's are answered, the likeliest.
    """

    prompts: list[list[int]]
    choices: list[Choice]
    deltas: Deltas
    num_kept: int
    record: RequestLog

    def collect(self) -> list[Delta]:
        """Waits for the end; one joined delta per answered choice, of each prompt the likeliest first if there was a choice."""
        pieces: list[list[Delta]] = [[] for _ in self.choices]

        def keep(index: int, delta: Delta) -> bool:
            pieces[index].append(delta)
            return True

        while self.deltas.wait(None, keep) and (found := next(self.deltas, None)) is not None:
            keep(*found)
        return [_join(pieces[index]) for index in self._kept()]

    def usage(self) -> Usage:
        return count_usage(self.prompts, self.choices)

    def _kept(self) -> list[int]:
        num_choices = len(self.choices) // len(self.prompts)
        if num_choices == self.num_kept:
            return list(range(len(self.choices)))
        groups = (range(start, start + num_choices) for start in range(0, len(self.choices), num_choices))
        ranked = (
            sorted(group, key=lambda index: self.choices[index].mean_logprob, reverse=True)
            for group in groups
        )
        return [index for group in ranked for index in group[: self.num_kept]]


class Runs:
    """Hands requests to the engine; shared by all HTTP threads."""

    def __init__(self, registry: Registry, settings: Settings, watcher: Watcher) -> None:
        self.registry = registry
        self._engine = engine = registry.engine
        self._timeout = settings.request_timeout
        self._defaults = Defaults(settings.default_max_tokens, settings.default_temperature)
        self._wave = min(settings.max_running or engine.max_inflight, engine.max_inflight)
        self._watcher = watcher
        self._seeds = Seeds(settings.seed)
        self._numbers = itertools.count()

    def borrow(
        self, name: str | None, held: ExitStack, deadline: float | None, client: socket.socket | None
    ) -> ServedModel:
        """The model of that name, or the default one, held until the end; waits until it is loaded or the deadline is there."""
        handle = held.enter_context(self.registry.borrow(name))
        if not handle.wait(0):
            with ExitStack() as watching:
                if client is not None:
                    watching.callback(self._watcher.unwatch, self._watcher.watch(client, handle.abandon))
                handle.wait(None if deadline is None else max(deadline - time.monotonic(), 0))
        if handle.is_abandoned:
            raise ClientGone("The client closed the connection.")
        return handle.model

    def start(
        self,
        body: ChatBody | CompletionBody,
        model: ServedModel,
        reservation: Reservation,
        held: ExitStack,
        *,
        record: RequestLog,
        deadline: float | None,
        client: socket.socket | None,
    ) -> Run:
        """Hands the request to the engine; whatever must be undone at the end is left in `held`."""
        num_prompts = len(body.prompts) if isinstance(body, CompletionBody) else 1
        reservation.grow_to(
            num_prompts * body.num_sequences, 0, "n" if body.num_sequences == body.num_choices else "best_of"
        )
        body = self._defaults.apply_to(body)
        prompts, requests = prepare(body, model, self._seeds, self.new_id(record.request_id), deadline)
        # Who names no limit may take the whole context but hardly will, and is counted as a long chat.
        most = TOKENS_PER_ROW if body.max_length is None else model.max_seq_len
        reservation.grow_to(
            len(requests),
            sum(len(request.prompt) + min(request.max_tokens, most) for request in requests),
            "max_tokens",
        )
        choices = make_choices(body, model.tokenizer, prompts)
        record.model, record.prompt_tokens, record.choices = model.name, sum(map(len, prompts)), choices
        deltas = self._submit(requests, model, choices, held, record, client)
        return Run(prompts, choices, deltas, body.num_choices, record)

    def compute(
        self,
        requests: Sequence[GenerationRequest],
        model: ServedModel,
        reservation: Reservation,
        record: RequestLog,
        client: socket.socket | None,
    ) -> list[Choice]:
        """Runs sequences that only compute their prompts, a wave at a time; gives them back ended, in order."""
        choices = [Choice(model.tokenizer.detokenizer(), StopStrings(())) for _ in requests]
        record.model, record.prompt_tokens, record.choices = (
            model.name,
            sum(len(request.prompt) for request in requests),
            choices,
        )
        waves = list(self._waves(requests))
        sizes = [sum(len(request.prompt) for request in requests[wave]) for wave in waves]
        reservation.grow_to(max(len(requests[wave]) for wave in waves), max(sizes))
        for wave in waves:
            with ExitStack() as held:
                for _ in self._submit(requests[wave], model, choices[wave], held, record, client):
                    pass
        return choices

    def new_id(self, request_id: str) -> str:
        """The engine's name for a request: a client may use one id twice at a time, two sequences never have the same."""
        return f"{request_id}.{next(self._numbers)}"

    def deadline(self, started: float, *timeouts: float | None) -> float | None:
        """When the shortest of the client's timeouts and the server's ends, on `time.monotonic`'s clock."""
        given = [seconds for seconds in (self._timeout, *timeouts) if seconds]
        return started + min(*given, MAX_SECONDS) if given else None

    def _waves(self, requests: Sequence[GenerationRequest]) -> Iterator[slice]:
        """As many as there are rows, and together no more tokens than leave room for others."""
        start, num_tokens = 0, 0
        for index, request in enumerate(requests):
            num_tokens += len(request.prompt)
            if index > start and (
                index - start == self._wave or num_tokens > self._engine.admission.max_tokens // WAVE_SHARE
            ):
                yield slice(start, index)
                start, num_tokens = index, len(request.prompt)
        yield slice(start, len(requests))

    def _submit(
        self,
        requests: Sequence[GenerationRequest],
        model: ServedModel,
        choices: Sequence[Choice],
        held: ExitStack,
        record: RequestLog,
        client: socket.socket | None,
    ) -> Deltas:
        record.submitted = record.submitted or time.monotonic()
        stream = self._engine.submit(requests, model)
        held.callback(stream.close)
        if client is not None:
            held.callback(self._watcher.unwatch, self._watcher.watch(client, stream.close))
        deltas = Deltas(stream, choices, requests[0].deadline)
        record.deltas.append(deltas)
        return deltas


def _join(deltas: list[Delta]) -> Delta:
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        deltas[-1].finish,
        tuple(offset for delta in deltas for offset in delta.offsets),
    )
