"""The events of a streamed response. Each has its type and a sequence number, counted from 0."""

from __future__ import annotations

from msgspec import Struct

from levserve.answers.logprobs import ChosenToken
from levserve.web.responses.objects import OutputItem, OutputText, ReasoningText, ResponseObject


class Event(Struct, frozen=True, tag_field="type"):
    sequence_number: int


class Created(Event, frozen=True, tag="response.created"):
    response: ResponseObject


class InProgress(Event, frozen=True, tag="response.in_progress"):
    response: ResponseObject


class ItemAdded(Event, frozen=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, frozen=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(Event, frozen=True):
    """An event inside an item."""

    item_id: str
    output_index: int


class PartEvent(ItemEvent, frozen=True):
    """An event inside the only part of an item's content."""

    content_index: int


class PartAdded(PartEvent, frozen=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(PartEvent, frozen=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(PartEvent, frozen=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChosenToken]


class TextDone(PartEvent, frozen=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChosenToken]


class ReasoningDelta(PartEvent, frozen=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(PartEvent, frozen=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(ItemEvent, frozen=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(ItemEvent, frozen=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class Completed(Event, frozen=True, tag="response.completed"):
    response: ResponseObject


class Incomplete(Event, frozen=True, tag="response.incomplete"):
    response: ResponseObject


class Failed(Event, frozen=True, tag="response.failed"):
    response: ResponseObject


ResponseEvent = (
    Created
    | InProgress
    | ItemAdded
    | PartAdded
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartDone
    | ItemDone
    | Completed
    | Incomplete
    | Failed
)
