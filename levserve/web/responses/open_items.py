"""The item of an output that is being written: its beginning, its pieces and its end, as events.

Used by `output.py`, by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from levserve.answers.logprobs import ChosenToken
from levserve.web.responses.event_types import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from levserve.web.responses.input_items import make_id
from levserve.web.responses.objects import (
    CallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)

Number = Callable[[], int]
"""Returns the next event's number."""


class OpenItem(Protocol):
    def opening(self) -> Iterator[Event]: ...

    def closing(self, status: Status) -> Iterator[Event]: ...

    def item(self, status: Status) -> OutputItem:
        """The item as written so far."""


class OpenMessage:
    def __init__(self, place: int, number: Number) -> None:
        self._id = make_id("msg_")
        self._place = place
        self._number = number
        self._texts: list[str] = []
        self._logprobs: list[ChosenToken] = []

    def opening(self) -> Iterator[Event]:
        yield ItemAdded(self._number(), self._place, MessageItem(self._id, Status.IN_PROGRESS, []))
        yield PartAdded(self._number(), self._id, self._place, 0, OutputText(""))

    def add(self, text: str, logprobs: list[ChosenToken]) -> Event:
        self._texts.append(text)
        self._logprobs += logprobs
        return TextDelta(self._number(), self._id, self._place, 0, text, logprobs)

    def closing(self, status: Status) -> Iterator[Event]:
        part = self._part()
        yield TextDone(self._number(), self._id, self._place, 0, part.text, part.logprobs)
        yield PartDone(self._number(), self._id, self._place, 0, part)
        yield ItemDone(self._number(), self._place, self.item(status))

    def item(self, status: Status) -> MessageItem:
        return MessageItem(self._id, status, [self._part()])

    def _part(self) -> OutputText:
        return OutputText("".join(self._texts), logprobs=self._logprobs)


class OpenReasoning:
    def __init__(self, place: int, number: Number) -> None:
        self._id = make_id("rs_")
        self._place = place
        self._number = number
        self._texts: list[str] = []

    def opening(self) -> Iterator[Event]:
        yield ItemAdded(self._number(), self._place, ReasoningItem(self._id, Status.IN_PROGRESS, []))
        yield PartAdded(self._number(), self._id, self._place, 0, ReasoningText(""))

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return ReasoningDelta(self._number(), self._id, self._place, 0, text)

    def closing(self, status: Status) -> Iterator[Event]:
        text = "".join(self._texts)
        yield ReasoningDone(self._number(), self._id, self._place, 0, text)
        yield PartDone(self._number(), self._id, self._place, 0, ReasoningText(text))
        yield ItemDone(self._number(), self._place, self.item(status))

    def item(self, status: Status) -> ReasoningItem:
        return ReasoningItem(self._id, status, [ReasoningText("".join(self._texts))])


class OpenCall:
    def __init__(self, place: int, number: Number, call_id: str, name: str) -> None:
        self._id = make_id("fc_")
        self._place = place
        self._number = number
        self._call_id = call_id
        self._name = name
        self._texts: list[str] = []

    def opening(self) -> Iterator[Event]:
        yield ItemAdded(self._number(), self._place, self.item(Status.IN_PROGRESS))

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return ArgumentsDelta(self._number(), self._id, self._place, text)

    def closing(self, status: Status) -> Iterator[Event]:
        arguments = "".join(self._texts)
        yield ArgumentsDone(self._number(), self._id, self._place, self._name, arguments)
        yield ItemDone(self._number(), self._place, self.item(status))

    def item(self, status: Status) -> CallItem:
        return CallItem(self._id, self._call_id, self._name, "".join(self._texts), status)
