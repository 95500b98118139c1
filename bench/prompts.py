"""The prompts of a load: made up from words, given as one text, or taken from a dataset.

A prompt depends on the seed and its number alone, so that two servers can be asked the same.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Each is one token with its leading space in SmolLM2's vocabulary, and in most others that know English.
WORDS = """time people water house world night story music river garden winter summer letter market school family father mother morning
evening window street table paper island forest mountain ocean bridge castle village city country road train ship horse bird tree flower
stone fire light wind rain snow cloud sun moon star earth field green white black small great old young long short early late open quiet
strong simple happy bright round deep wide high low warm cold new first last next other many few more less red blue gold silver""".split()
ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
}


class UnreadableDataset(Exception):
    """A file that holds no prompts; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that waits for its answer; one of a single message is also a plain text."""

    messages: tuple[tuple[str, str], ...]
    output_tokens: int | None = None
    """How long its answer may be, where the dataset says so."""

    @property
    def text(self) -> str:
        return "\n\n".join(content for _, content in self.messages)

    def as_chat(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.messages]


def plain(text: str, output_tokens: int | None = None) -> Prompt:
    return Prompt((("user", text),), output_tokens)


def make_up(rng: random.Random, num_words: int, shared: Sequence[str]) -> Prompt:
    """A prompt of `num_words` words, which begins with the shared ones."""
    own = rng.choices(WORDS, k=num_words - len(shared))
    return plain(" ".join([*shared, *own]))


def spread_length(length: int, spread: float, rng: random.Random) -> int:
    """A random length that differs from `length` by at most the share `spread`, evenly distributed."""
    return max(round(length * rng.uniform(1 - spread, 1 + spread)), 1)


def pick(prompts: Sequence[Prompt], seed: int | None, number: int) -> Prompt:
    """The prompt with this number, in an order that the seed shuffles; after the last comes the first again."""
    return prompts[_shuffled(len(prompts), seed)[number % len(prompts)]]


@functools.cache
def _shuffled(count: int, seed: int | None) -> list[int]:
    return random.Random(f"{seed} dataset").sample(range(count), count)


@functools.cache
def read_dataset(path: str) -> tuple[Prompt, ...]:
    """Reads a JSON list, or one JSON value a line; prompts without text are left out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableDataset(f"not UTF-8: {error}") from None
    records = _read_list(text) if text.lstrip().startswith("[") else _read_lines(text)
    prompts = []
    for place, record in records:
        try:
            prompt = read_prompt(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnreadableDataset(f"{place} is not a prompt: {error}") from None
        if prompt.text.strip():
            prompts.append(prompt)
    if not prompts:
        raise UnreadableDataset("it has no prompts")
    return tuple(prompts)


def _read_list(text: str) -> list[tuple[str, Any]]:
    try:
        return [(f"item {number}", record) for number, record in enumerate(json.loads(text), 1)]
    except ValueError as error:
        raise UnreadableDataset(f"not JSON: {error}") from None


def _read_lines(text: str) -> list[tuple[str, Any]]:
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            records.append((f"line {number}", json.loads(line)))
        except ValueError as error:
            raise UnreadableDataset(f"line {number} is not JSON: {error}") from None
    return records


def read_prompt(record: Any) -> Prompt:
    """One record of a dataset; raises ValueError, KeyError or TypeError where it has no known shape."""
    if isinstance(record, str):
        return plain(record)
    output_tokens = record.get("output_tokens", record.get("max_tokens"))
    if output_tokens is not None and (type(output_tokens) is not int or output_tokens < 1):
        raise ValueError(f"output_tokens is {output_tokens!r}, not a number above 0")
    if isinstance(record.get("prompt"), str):
        return plain(record["prompt"], output_tokens)
    name = next((name for name in ("messages", "conversations", "conversation") if name in record), None)
    if name is None:
        raise ValueError("it has none of prompt, messages and conversations")
    messages = [_read_turn(turn) for turn in record[name]]
    # OpenAI's messages are a conversation up to its question; ShareGPT's go on with answers and further questions.
    asked = messages if name == "messages" else _before_answer(messages)
    return Prompt(tuple(asked), output_tokens)


def _read_turn(turn: dict[str, Any]) -> tuple[str, str]:
    name = turn.get("role") or turn["from"]
    content = turn["content"] if "content" in turn else turn["value"]
    if name not in ROLES:
        raise ValueError(f"{name!r} is not a known role")
    if not isinstance(content, str):
        raise ValueError("a turn's content is not a text")
    return ROLES[name], content


def _before_answer(messages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The turns before the first answer that follows a question; answers before any question are dropped."""
    asked: list[tuple[str, str]] = []
    for role, content in messages:
        if role != "assistant":
            asked.append((role, content))
        elif any(earlier == "user" for earlier, _ in asked):
            break
    return asked
