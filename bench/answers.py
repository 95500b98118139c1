"""Checks the answers of `load.py`, streamed and whole, and keeps what the figures are made of.

A check is fed bytes with their times of arrival and knows nothing of sockets. It raises `WrongAnswer` at
the first mistake; `close` says that no more bytes will come, and sets the token counts.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from http_client import EventStream, WrongAnswer
from load_options import Settings

NOT_THE_SHAPE = (ValueError, LookupError, TypeError, AttributeError)


class Check(Protocol):
    deltas: list[tuple[float, int]]
    """Time and characters of each content delta; a whole answer has none."""
    prompt_tokens: int
    completion_tokens: int

    def feed(self, piece: bytes, at: float) -> None: ...

    def close(self) -> None: ...


def make_check(settings: Settings) -> Check:
    return AnswerCheck(settings) if settings.is_streamed else WholeCheck(settings)


class AnswerCheck:
    """Reads one streamed answer as it arrives."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.deltas: list[tuple[float, int]] = []
        self.prompt_tokens = self.completion_tokens = 0
        self._events = EventStream()
        self._ids: set[str] = set()
        self._has_finished: dict[int, bool] = {}  # by choice
        self._usage: Any = None
        self._is_done = False

    def feed(self, piece: bytes, at: float) -> None:
        for event in self._events.feed(piece):
            self._read_event(event, at)

    def close(self) -> None:
        if self._events.is_inside_event:
            raise WrongAnswer("truncated", "the stream ends inside an event")
        if not self._is_done:
            raise WrongAnswer(
                "missing_done", f"the stream ends without [DONE], after {len(self.deltas)} content deltas"
            )
        if not self._has_finished or not all(self._has_finished.values()):
            raise WrongAnswer("finish", "a choice has no finish chunk")
        if not self.deltas:
            raise WrongAnswer("empty_text", "the answer has no text")
        if not isinstance(self._usage, dict):
            raise WrongAnswer(
                "missing_usage", "no chunk has usage although stream_options.include_usage was set"
            )
        self.prompt_tokens, self.completion_tokens = check_usage(self._usage, self._settings)

    def _read_event(self, event: bytes, at: float) -> None:
        if self._is_done:
            raise WrongAnswer("malformed", b"an event after [DONE]: " + event)
        self._is_done = event == b"[DONE]"
        if self._is_done:
            return
        try:
            self._read_chunk(json.loads(event), at)
        except NOT_THE_SHAPE as error:
            raise WrongAnswer("malformed", f"not a chunk ({error!r}): {event!r}") from error

    def _read_chunk(self, chunk: dict[str, Any], at: float) -> None:
        if chunk.get("error"):
            raise WrongAnswer("error_event", json.dumps(chunk["error"]))
        self._ids.add(chunk["id"])
        if len(self._ids) > 1:
            raise WrongAnswer("mixed_ids", f"one stream has the ids {self._ids}")
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            index, finish = choice["index"], choice.get("finish_reason")
            text = (
                choice["text"] if self._settings.endpoint == "completions" else choice["delta"].get("content")
            )
            if self._has_finished.get(index) and (text or finish):
                raise WrongAnswer("finish", f"choice {index} goes on after its finish chunk")
            self._has_finished[index] = self._has_finished.get(index, False) or bool(finish)
            if text:
                self.deltas.append((at, len(text)))


class WholeCheck:
    """Collects the body of one answer, and checks it when it is complete."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.deltas: list[tuple[float, int]] = []
        self.prompt_tokens = self.completion_tokens = 0
        self._body = b""

    def feed(self, piece: bytes, at: float) -> None:
        self._body += piece

    def close(self) -> None:
        try:
            answer = json.loads(self._body)
            texts, finishes = self._read_texts(answer)
            usage = answer["usage"]
        except NOT_THE_SHAPE as error:
            raise WrongAnswer("malformed", f"not an answer ({error!r}): {self._body!r}") from error
        if len(texts) != self._settings.batch:
            raise WrongAnswer("malformed", f"{len(texts)} texts for {self._settings.batch} prompts")
        if not all(finishes):
            raise WrongAnswer("finish", "a choice has no finish reason")
        if not any(texts):
            raise WrongAnswer("empty_text", "the answer has no text")
        if not isinstance(usage, dict):
            raise WrongAnswer("missing_usage", "the answer has no usage")
        self.prompt_tokens, self.completion_tokens = check_usage(usage, self._settings)

    def _read_texts(self, answer: dict[str, Any]) -> tuple[list[str], list[str | None]]:
        """The text and the finish reason of each choice."""
        if self._settings.endpoint == "generate":
            texts = answer["completions"]
            # Only levserve's /generate tells why a text ended.
            return texts, answer.get("finish_reasons", ["unknown"] * len(texts))
        choices = answer["choices"]
        finishes = [choice["finish_reason"] for choice in choices]
        if self._settings.endpoint == "chat":
            return [choice["message"]["content"] for choice in choices], finishes
        return [choice["text"] for choice in choices], finishes


def check_usage(usage: dict[str, Any], settings: Settings) -> tuple[int, int]:
    """The tokens of prompt and answer; raises `WrongAnswer` if the answer has too few or too many."""
    prompt_tokens, completion_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    most = settings.output_tokens * settings.batch
    fewest = most if settings.has_fixed_length else 1
    is_possible = type(prompt_tokens) is int and prompt_tokens >= 1
    if not is_possible or completion_tokens not in range(fewest, most + 1):
        raise WrongAnswer("wrong_usage", f"asked for {fewest} to {most} tokens, usage is {usage}")
    return prompt_tokens, completion_tokens
