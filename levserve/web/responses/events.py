"""Streams a response: its events in OpenAI's order, each with an `event:` line, and no [DONE] at the end."""

from __future__ import annotations

from collections.abc import Iterable

from levserve.errors import BadRequest, ServeError
from levserve.generation import Delta
from levserve.web.events import named_event
from levserve.web.responses.body import RESPONSE_NAMES
from levserve.web.responses.event_types import Completed, Created, Event, Failed, Incomplete, InProgress
from levserve.web.responses.exchange import Exchange
from levserve.web.responses.objects import Status, fail_response
from levserve.web.responses.output import Output
from levserve.web.run import Run


class ResponseStream:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def begin(self, run: Run) -> ResponseEvents:
        return ResponseEvents(self._exchange, run)

    def refusal(self, error: ServeError) -> bytes:
        """Begins with `response.created`: OpenAI's SDK accepts a failure only after it."""
        if isinstance(error, BadRequest):
            RESPONSE_NAMES.rename(error)
        draft = self._exchange.draft
        return _frame((Created(0, draft), Failed(1, fail_response(draft, error))))


class ResponseEvents:
    """The events of one stream. Used by one thread at a time."""

    def __init__(self, exchange: Exchange, run: Run) -> None:
        self._exchange = exchange
        self._run = run
        self._begun = exchange.begin(run)
        self._output = Output(run.choices[0], run.model.tokenizer)

    def opening(self) -> bytes:
        number = self._output.number
        return _frame((Created(number(), self._begun), InProgress(number(), self._begun)))

    def delta(self, index: int, delta: Delta) -> bytes:
        return _frame(self._output.add(delta))

    def closing(self) -> bytes:
        last = _frame(self._output.close())
        response = self._exchange.end(self._begun, self._output, self._run)
        kind = Completed if response.status is Status.COMPLETED else Incomplete
        return last + _frame((kind(self._output.number(), response),))

    def failure(self, error: ServeError) -> bytes:
        failed = fail_response(self._begun, error, self._output.items)
        return _frame((Failed(self._output.number(), failed),))


def _frame(events: Iterable[Event]) -> bytes:
    return b"".join(map(named_event, events))
