"""The messages of a chat's answer: content, thoughts and calls of tools, whole or piece by piece.

Used on HTTP threads and by the relay. A whole message holds what the pieces of its stream join to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET, Struct, UnsetType

from levserve.text.parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Thought,
    join_calls,
    join_content,
    join_thoughts,
)


class FunctionPiece(Struct, frozen=True):
    """A called function, or more of its arguments, which are JSON text as the model wrote it."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CallPiece(Struct, frozen=True):
    """A call of a tool, or in a stream more of its arguments; only a stream has the index."""

    function: FunctionPiece
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AnswerMessage(Struct, frozen=True):
    """A chat message, or the new part of one. The thoughts appear under both names that clients read."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: Sequence[CallPiece] | UnsetType = UNSET
    function_call: FunctionPiece | UnsetType = UNSET
    """The one call, for a client that sent `functions`."""


def piece_messages(parts: Iterable[Part], *, is_function: bool) -> Iterator[AnswerMessage]:
    """What a stream shows of these parts, one message for each."""
    for part in parts:
        match part:
            case Content(text):
                yield AnswerMessage(content=text)
            case Thought(text):
                yield AnswerMessage(reasoning_content=text, reasoning=text)
            case CallStart(number, call_id, name):
                function = FunctionPiece(name)
                if is_function:
                    yield AnswerMessage(function_call=function)
                else:
                    yield AnswerMessage(tool_calls=[CallPiece(function, number, call_id, "function")])
            case CallArguments(number, text):
                function = FunctionPiece(arguments=text)
                if is_function:
                    yield AnswerMessage(function_call=function)
                else:
                    yield AnswerMessage(tool_calls=[CallPiece(function, number)])


def whole_message(parts: Sequence[Part], *, is_function: bool) -> AnswerMessage:
    """The message of an answer that is not streamed; its content is null if there are calls and no text."""
    content = join_content(parts)
    thoughts = join_thoughts(parts) or UNSET
    calls = [
        CallPiece(FunctionPiece(start.name, arguments), id=start.id, type="function")
        for start, arguments in join_calls(parts)
    ]
    return AnswerMessage(
        "assistant",
        content if content or not calls else None,
        None,
        thoughts,
        thoughts,
        UNSET if is_function or not calls else calls,
        calls[0].function if is_function and calls else UNSET,
    )


def has_call(parts: Iterable[Part] | None) -> bool:
    return any(isinstance(part, CallStart) for part in parts or ())
