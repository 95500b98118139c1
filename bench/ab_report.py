"""Shows what `ab.py` found: a table of all servers, their answers side by side, and everything as JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ab_options import Server
from difference import Answer, Difference
from figures import percentiles
from kinds import Ask
from table import align


@dataclass(frozen=True, slots=True)
class Round:
    """One question and every server's answer to it, in the order of the servers."""

    ask: Ask
    answers: list[Answer]
    differences: list[Difference | None]
    """From the first answer; None for the first answer itself and where either answer failed."""


def summarize(servers: Sequence[Server], rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """By server: how often it agrees with the first, how far apart they are, and its times."""
    return {server.name: summarize_one(rounds, place) for place, server in enumerate(servers)}


def summarize_one(rounds: Sequence[Round], place: int) -> dict[str, Any]:
    answers = [each.answers[place] for each in rounds]
    done = [answer for answer in answers if answer.failure is None]
    compared = [each.differences[place] for each in rounds]
    differences = [found for found in compared if found is not None]
    chars = [found.at_char for found in differences if found.at_char is not None]
    logprobs = [value for found in differences for value in found.logprob_differences]
    output_tokens = sum(answer.completion_tokens or 0 for answer in done)
    seconds = sum(answer.total_seconds for answer in done)
    return {
        "asked": len(answers),
        "failed": len(answers) - len(done),
        "compared": len(differences),
        "same": sum(found.is_same for found in differences),
        "median_first_difference_chars": statistics.median(chars) if chars else None,
        "logprob_difference": {
            "tokens": len(logprobs),
            "mean": statistics.fmean(logprobs) if logprobs else None,
            "max": max(logprobs, default=None),
        },
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / seconds if seconds else 0.0,
        "latency_ms": {
            "TTFT": in_ms([answer.ttft_seconds for answer in done]),
            "inter-token": in_ms([answer.itl_seconds for answer in done]),
            "request": in_ms([answer.total_seconds for answer in done]),
        },
    }


def in_ms(values: Sequence[float | None]) -> dict[str, float]:
    return percentiles([1e3 * seconds for seconds in values if seconds is not None])


def make_table(servers: Sequence[Server], summary: dict[str, dict[str, Any]]) -> str:
    """Markdown: a column for each server."""
    columns = [summary[server.name] for server in servers]
    first = servers[0].name
    lines = [["", *(server.name for server in servers)], ["---", *["---:"] * len(servers)]]
    lines.append([f"same text as {first}", "-", *(show_same(column) for column in columns[1:])])
    lines.append(["parts at character, median", "-", *(show_part(column) for column in columns[1:])])
    lines.append(["log-probability apart, mean / max", "-", *(show_logprobs(one) for one in columns[1:])])
    for name in ("TTFT", "inter-token", "request"):
        lines.append([f"{name}, mean / p95, ms", *(show_times(column, name) for column in columns)])
    lines.append(["output tok/s", *(f"{column['output_tokens_per_second']:.1f}" for column in columns)])
    lines.append(["failed", *(str(column["failed"]) for column in columns)])
    return align(lines)


def show_same(column: dict[str, Any]) -> str:
    return f"{column['same']} of {column['compared']}"


def show_part(column: dict[str, Any]) -> str:
    median = column["median_first_difference_chars"]
    return "-" if median is None else f"{median:g}"


def show_logprobs(column: dict[str, Any]) -> str:
    found = column["logprob_difference"]
    return f"{found['mean']:.4f} / {found['max']:.4f}" if found["tokens"] else "-"


def show_times(column: dict[str, Any], name: str) -> str:
    ranks = column["latency_ms"][name]
    return f"{ranks['mean']:.1f} / {ranks['p95']:.1f}" if ranks else "-"


def make_sides(servers: Sequence[Server], rounds: Sequence[Round], width: int) -> str:
    """Every question with all answers below it, marked = or x: the same as the first answer, or not."""
    margin = max(len(server.name) for server in servers)
    lines = []
    for number, each in enumerate(rounds, 1):
        lines.append(f"\n[{number}] {cut(each.ask.prompt, width)}, seed {each.ask.seed}")
        for server, answer, found in zip(servers, each.answers, each.differences):
            sign = " " if found is None else "=" if found.is_same else "x"
            said = answer.failure if answer.failure is not None else cut(answer.text, width)
            lines.append(f"  {server.name:<{margin}} {sign} {said}")
            if found is not None and not found.is_same:
                token = "" if found.at_token is None else f", token {found.at_token}"
                lines.append(
                    f"  {'':<{margin}}   parts at character {found.at_char}{token}: {found.first} against {found.other}"
                )
    return "\n".join(lines)


def cut(text: str, width: int) -> str:
    shown = repr(text)
    return shown if not width or len(shown) <= width else shown[: width - 3] + "..."


def find_notes(servers: Sequence[Server], rounds: Sequence[Round]) -> list[str]:
    """Returns what a reader must know before trusting the numbers."""
    notes = []
    for place, server in enumerate(servers):
        answers = [each.answers[place] for each in rounds]
        for answer in (answer for answer in answers if answer.failure is not None):
            notes.append(f"{server.name} failed, first: {answer.failure}")
            break
        for field in ("ignore_eos", "top_k"):
            if field in server.kind.lacks and rounds and getattr(rounds[0].ask, field):
                notes.append(f"{server.name} cannot be told {field}, so its answers are drawn without it")
        done = [answer for answer in answers if answer.failure is None]
        if done and rounds[0].ask.logprobs and not any(answer.tokens for answer in done):
            notes.append(f"{server.name} gives no log-probabilities")
    first, *others = zip(*(each.answers for each in rounds)) if rounds else ((),)
    for server, answers_of in zip(servers[1:], others):
        pairs = [(one.prompt_tokens, two.prompt_tokens) for one, two in zip(first, answers_of)]
        unlike = [(one, two) for one, two in pairs if None not in (one, two) and one != two]
        if unlike:
            notes.append(
                f"{server.name} counts other prompt tokens than {servers[0].name} ({unlike[0][1]} and {unlike[0][0]} in the "
                "first such prompt): one of them may add a token at the beginning, or has another tokenizer"
            )
    return notes


def make_document(servers: Sequence[Server], rounds: Sequence[Round]) -> dict[str, Any]:
    return {
        "format": 1,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "servers": [
            {"name": one.name, "kind": one.kind.name, "url": one.address.url, "model": one.model}
            for one in servers
        ],
        "summary": summarize(servers, rounds),
        "notes": find_notes(servers, rounds),
        "questions": [
            {
                "ask": asdict(each.ask),
                "answers": [asdict(answer) for answer in each.answers],
                "differences": [asdict(found) if found else None for found in each.differences],
            }
            for each in rounds
        ],
    }
