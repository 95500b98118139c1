"""A parsed request on its way through the engine: started, collected or streamed, and undone on every way out.

Shared by every endpoint that generates. Runs on HTTP threads.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from levserve.config import Settings
from levserve.engine.engine import Engine, Reservation, ServedModel
from levserve.errors import BadRequest
from levserve.generation import Choice, Delta, generate
from levserve.text.stops import StopStrings
from levserve.web.answer import Usage, count_usage
from levserve.web.schema import ChatBody, CompletionBody
from levserve.web.submission import Seeds, prepare
from levserve.web.watcher import Watcher


@dataclass(frozen=True, slots=True)
class Run:
    """A request that the engine has: its choices, and their deltas as they come. Belongs to one HTTP thread."""

    prompts: list[list[int]]
    choices: list[Choice]
    deltas: Iterator[tuple[int, Delta]]

    def collect(self) -> list[Delta]:
        """Waits for the end; one joined delta per choice."""
        pieces: list[list[Delta]] = [[] for _ in self.choices]
        for index, delta in self.deltas:
            pieces[index].append(delta)
        return [_join(deltas) for deltas in pieces]

    def usage(self) -> Usage:
        return count_usage(self.prompts, self.choices)


class Runs:
    """Hands requests to the engine; shared by all HTTP threads."""

    def __init__(self, engine: Engine, settings: Settings, watcher: Watcher) -> None:
        self._engine = engine
        self._timeout = settings.request_timeout
        self._watcher = watcher
        self._seeds = Seeds(settings.seed)
        self._numbers = itertools.count()

    def start(
        self,
        body: ChatBody | CompletionBody,
        model: ServedModel,
        reservation: Reservation,
        held: ExitStack,
        *,
        request_id: str,
        started: float,
        client: socket.socket | None,
    ) -> Run:
        """Hands the request to the engine; whatever must be undone at the end is left in `held`."""
        # A client may use one request id twice at a time; two sequences of the engine never have the same.
        engine_id = f"{request_id}.{next(self._numbers)}"
        deadline = started + self._timeout if self._timeout else None
        prompts, requests = prepare(body, model, self._seeds, engine_id, deadline)
        if len(requests) > self._engine.max_inflight:
            most = self._engine.max_inflight
            raise BadRequest(f"The request asks for {len(requests)} choices in all; this server runs {most}.", param="n")
        reservation.grow_to(len(requests))
        stream = self._engine.submit(requests)
        held.callback(stream.close)
        if client is not None:
            held.callback(self._watcher.unwatch, self._watcher.watch(client, stream.close))
        choices = [_make_choice(body, model) for _ in requests]
        return Run(prompts, choices, generate(stream, choices))


def _make_choice(body: ChatBody | CompletionBody, model: ServedModel) -> Choice:
    # The text of a completion goes on from its prompt, and so does a continued message; a new message starts afresh.
    continues = isinstance(body, CompletionBody) or body.continue_final_message is True
    detokenizer = model.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False, continues=continues)
    return Choice(detokenizer, StopStrings(body.stops, include=body.include_stop_str_in_output is True))


def _join(deltas: list[Delta]) -> Delta:
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        deltas[-1].finish,
        tuple(offset for delta in deltas for offset in delta.offsets),
    )
