"""Makes the items of a response from the deltas of its run, and the events that announce them.

Used by one thread at a time, for whole responses and for streams, so that both have the same items.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from levserve.answers.logprobs import ChosenToken, chat_logprobs
from levserve.generation import Choice, Delta
from levserve.schedule.request import FinishReason
from levserve.text.parts import CallArguments, CallStart, Content, Part, Thought
from levserve.text.tokenizer import Tokenizer
from levserve.web.responses.event_types import Event
from levserve.web.responses.objects import OutputItem, ReasoningItem, Status
from levserve.web.responses.open_items import OpenCall, OpenItem, OpenMessage, OpenReasoning


class Output:
    """The output of one response. Only the text of messages has log-probabilities."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer) -> None:
        self._choice = choice
        self._tokenizer = tokenizer
        self._numbers = itertools.count()
        self._done: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._scored: list[ChosenToken] = []
        """Tokens whose text is held back, or not yet known to be a message's."""
        self._num_thoughts = 0
        self._has_calls = False
        self._cuts_call = False
        self.finish: FinishReason | None = None

    def number(self) -> int:
        """The number of the next event."""
        return next(self._numbers)

    @property
    def status(self) -> Status:
        return Status.COMPLETED if self.finish is FinishReason.STOP else Status.INCOMPLETE

    @property
    def items(self) -> list[OutputItem]:
        """All items; one that is still open counts as incomplete."""
        return self._done if self._open is None else [*self._done, self._open.item(Status.INCOMPLETE)]

    def add(self, delta: Delta) -> Iterator[Event]:
        """Takes a delta. Its events must be consumed before the next delta is added."""
        self.finish, self._cuts_call = delta.finish, delta.cuts_call
        self._keep_scores(delta)
        for part in delta.shown:
            yield from self._add_part(part)
        if self._scored and isinstance(self._open, OpenMessage):
            yield self._open.add("", self._take_scores())

    def close(self) -> Iterator[Event]:
        """Ends the last item. A complete answer without a message or a call gets an empty message."""
        is_missing = all(isinstance(item, ReasoningItem) for item in self.items)
        if is_missing and (self.status is Status.COMPLETED or not self.items):
            message = OpenMessage(self._next_place(), self.number)
            yield from self._switch(message)
            if self._scored:
                yield message.add("", self._take_scores())
        # A stop string completes a response, even within a call, but not the call.
        yield from self._close(Status.INCOMPLETE if self._cuts_call else self.status)

    def _add_part(self, part: Part) -> Iterator[Event]:
        match part:
            case Content(text):
                message = self._open
                if not isinstance(message, OpenMessage):
                    message = OpenMessage(self._next_place(), self.number)
                    yield from self._switch(message)
                yield message.add(text, self._take_scores())
            case Thought(text):
                self._scored.clear()
                reasoning = self._open
                if not isinstance(reasoning, OpenReasoning):
                    reasoning = OpenReasoning(self._next_place(), self.number)
                    yield from self._switch(reasoning)
                yield reasoning.add(text)
            case CallStart(_, call_id, name):
                self._has_calls = True
                self._scored.clear()
                yield from self._switch(OpenCall(self._next_place(), self.number, call_id, name))
            case CallArguments(_, text):
                assert isinstance(self._open, OpenCall)  # a call's arguments follow its start
                yield self._open.add(text)

    def _keep_scores(self, delta: Delta) -> None:
        """Keeps the delta's log-probabilities, except those of thoughts, which come first, and of calls."""
        scored = chat_logprobs(delta, self._tokenizer)
        if scored is None or self._has_calls:
            return
        num_before, self._num_thoughts = self._num_thoughts, self._choice.num_thought_tokens
        self._scored += scored.content[self._num_thoughts - num_before :]

    def _take_scores(self) -> list[ChosenToken]:
        taken, self._scored = self._scored, []
        return taken

    def _next_place(self) -> int:
        return len(self._done) + (self._open is not None)

    def _switch(self, item: OpenItem) -> Iterator[Event]:
        yield from self._close(Status.COMPLETED)
        self._open = item
        yield from item.opening()

    def _close(self, status: Status) -> Iterator[Event]:
        if self._open is not None:
            item, self._open = self._open, None
            self._done.append(item.item(status))
            yield from item.closing(status)
