"""The settings of `load.py`: every flag declared once, and the command line made from it."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from http_client import Address
from prompts import UnreadableDataset, read_dataset

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
OWN_LENGTHS = ("prompt_tokens", "prompt_spread", "shared_prefix")
"""Options that say how prompts are made up; they are refused with a given prompt or a dataset."""
EPILOG = """\
examples:
  python bench/load.py --url http://127.0.0.1:8000 --concurrency 8 --requests 64 --prompt-tokens 100 --output-tokens 64
  python bench/load.py --concurrency 1,5,10,20,50 --requests 100 --warmup 8 --plot sweep.png --json sweep.json
  python bench/load.py --endpoint chat --rate 4 --concurrency 64 --requests 200 --goodput-ttft-ms 500 --goodput-itl-ms 50
  python bench/load.py --endpoint chat --dataset ShareGPT_V3_unfiltered_cleaned_split.json --requests 200
  python bench/load.py --endpoint generate --batch 8 --rate 10 --concurrency 64 --requests 300 --prompt "Once upon a time"

a sweep: --concurrency or --rate may be a list, 1,5,10; every step runs --warmup and --requests of its own, with other prompts than
the steps before it, and all steps share one table, one plot and one JSON file.

a dataset: a file with one JSON value a line, or one JSON list. A value is a text, or an object with `prompt` (a text), `messages`
(OpenAI's form) or `conversations` (ShareGPT's; the turns before the first answer are asked). `output_tokens` in it wins over
--output-tokens. Where an endpoint takes no messages, their texts are joined by empty lines. --seed shuffles.

what is checked: status 200, well-formed SSE, one id in all chunks, exactly one finish chunk per choice, no error event, some text,
usage, [DONE] at the end, and usage.completion_tokens equal to --output-tokens (at most that with --no-ignore-eos and from /generate,
which knows no ignore_eos). A whole answer has a finish reason and a text for each prompt. A request fails once, by the first thing
found: http_STATUS, connection, timeout, truncated, malformed, error_event, mixed_ids, finish, missing_done, missing_usage,
wrong_usage, empty_text.

what the numbers mean: tokens and times are of requests that did not fail. A request is sent when its own new connection begins to
open, so that a full accept queue shows; with --keep-alive only a worker's first has a new one. A content delta is a chunk with
non-empty text.
  wall seconds    first request sent to last answer ended
  requests/s      requests that did not fail / wall seconds
  output tok/s    sum of usage.completion_tokens / wall seconds; prompt tok/s the same with usage.prompt_tokens
  TTFT            request sent to its first content delta; one value a request; a whole answer has none
  delta gap       time between two content deltas of a stream; one value a gap
  inter-token     delta gap / tokens in a delta; one value a gap. Tokens in a delta = completion_tokens after the stream's first delta
                  / its gaps, where the first delta's tokens are its share of the characters; at least one token a delta is assumed,
                  so the number is exact when each token comes by itself
  request         request sent to the end of its answer; one value a request
  p50 p90 p95 p99 nearest rank: the smallest value that at least so many percent of the values do not exceed
  goodput/s       good requests / wall seconds. A request is good when it did not fail, its TTFT is at most --goodput-ttft-ms, the
                  mean time between its tokens at most --goodput-itl-ms and all of it at most --goodput-request-ms

exit code: 0 every answer was right, 1 some failed or the run could not start, 2 wrong usage, 130 Ctrl-C (prints what it has).
"""


def option(default: Any, text: str, *, least: float = -math.inf, **details: Any) -> Any:
    shown = "" if default in (None, True) else " (default: %(default)s)"
    metavar = {"metavar": "N"} if "type" in details else {}
    flag = {"help": text + shown, **metavar, **details}
    return field(default=default, metadata={"least": least, "flag": flag})


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Reads `1,5,10`, and tells argparse what it expected."""

    def read(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    read.__name__ = f"list of {kind.__name__}"
    return read


@dataclass(frozen=True, slots=True)
class Settings:
    """One step of a run. `parse` makes the command line from the fields, and a step per number of a list."""

    url: str = option("http://127.0.0.1:8000", "the server's address, with or without /v1")
    endpoint: str = option("completions", "what to call", choices=tuple(PATHS))
    model: str | None = option(None, "model to ask for (default: the first of GET /v1/models)")
    api_key: str | None = option(None, "sent as a bearer token (default: $OPENAI_API_KEY)")
    concurrency: int = option(
        8,
        "requests at a time, or a list of such numbers; with --rate the most connections, reported when they bind",
        type=list_of(int),
        least=1,
    )
    requests: int = option(64, "requests that count, in each step", type=int, least=1)
    warmup: int = option(0, "requests before those, which do not", type=int, least=0)
    rate: float | None = option(
        None,
        "arrivals a second, as a Poisson process that waits for no answer; or a list of rates",
        type=list_of(float),
        least=1e-3,
    )
    stream: bool | None = option(
        None,
        "stream the answers, or take them whole (default: stream; /generate answers whole)",
        action=argparse.BooleanOptionalAction,
    )
    batch: int = option(1, "prompts in each request; whole answers only, and not of chat", type=int, least=1)
    prompt: str | None = option(None, "the one prompt of all requests", metavar="TEXT")
    dataset: str | None = option(None, "a file of prompts, as described below", metavar="FILE")
    prompt_tokens: int = option(
        100, "words in a prompt, each about a token; usage has the true number", type=int, least=1
    )
    prompt_spread: float = option(0.0, "by what share of that they differ", type=float, least=0)
    shared_prefix: int = option(
        0, "how many of them, from the first, all prompts share; the rest differ", type=int, least=0
    )
    output_tokens: int = option(64, "max_tokens of each request", type=int, least=1)
    output_spread: float = option(
        0.0, "by what share of that they differ, so that they do not end together", type=float, least=0
    )
    temperature: float = option(0.0, "of each request; 0 is greedy", type=float, least=0)
    ignore_eos: bool = option(
        True,
        "send ignore_eos for a fixed length; OpenAI itself refuses it",
        action=argparse.BooleanOptionalAction,
    )
    seed: int | None = option(
        None,
        "fixes prompts and arrivals (default: new each run; a prefix cache may know an old one)",
        type=int,
    )
    keep_alive: bool = option(
        False,
        "ask again on the same connection, as SDKs do, and not on a new one each time",
        action="store_true",
    )
    goodput_ttft_ms: float | None = option(None, "a good request's first text by then", type=float, least=0)
    goodput_itl_ms: float | None = option(
        None, "a good request's mean time between tokens at most", type=float, least=0
    )
    goodput_request_ms: float | None = option(None, "a good request's end by then", type=float, least=0)
    timeout: float = option(
        600.0, "seconds that a connect, a read or a whole request may take", type=float, least=1e-3
    )
    wait_ready: float = option(
        0.0,
        "first wait so many seconds for GET /readyz, or /v1/models where that is 404",
        type=float,
        least=0,
    )
    json: str | None = option(
        None, "write settings, versions, summary and every request here too; - is stdout", metavar="FILE"
    )
    plot: str | None = option(None, "draw the steps here, a PNG or SVG; needs matplotlib", metavar="FILE")

    @property
    def address(self) -> Address:
        return Address(self.url, self.api_key, self.timeout)

    @property
    def is_streamed(self) -> bool:
        return self.endpoint != "generate" if self.stream is None else self.stream

    @property
    def has_fixed_length(self) -> bool:
        """/generate takes no ignore_eos, so its answers may be shorter."""
        return self.ignore_eos and self.endpoint != "generate"

    @property
    def has_goodput(self) -> bool:
        limits = (self.goodput_ttft_ms, self.goodput_itl_ms, self.goodput_request_ms)
        return any(limit is not None for limit in limits)


def parse(argv: Sequence[str] | None, about: str) -> list[Settings]:
    """The steps of the run, at least one; wrong usage ends the program."""
    parser = argparse.ArgumentParser(
        prog="load.py",
        description=about,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for setting in fields(Settings):
        parser.add_argument(flag_of(setting.name), default=setting.default, **setting.metadata["flag"])
    given = parser.parse_args(argv)
    check_least(parser, given)
    check_prompts(parser, given)
    check_answers(parser, given)
    check_files(parser, given)
    if not given.url.startswith(("http://", "https://")):
        parser.error(f"--url {given.url} does not start with http:// or https://")
    given.api_key = (given.api_key or os.environ.get("OPENAI_API_KEY", "")).strip()
    given.seed = random.randrange(2**31) if given.seed is None else given.seed
    return make_steps(parser, given)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_least(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    for setting in fields(Settings):
        value, least = getattr(given, setting.name), setting.metadata["least"]
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not number >= least:
                parser.error(f"{flag_of(setting.name)} {number} is below {least}")


def check_prompts(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    shortest = max(round(given.prompt_tokens * (1 - given.prompt_spread)), 1)
    if given.shared_prefix >= shortest:
        parser.error(
            f"--shared-prefix {given.shared_prefix} leaves nothing to differ of a prompt of {shortest} words, the shortest that "
            "--prompt-tokens and --prompt-spread make"
        )
    if given.prompt is not None and given.dataset:
        parser.error("--prompt and --dataset both say what to ask: give one of them")
    source = "--dataset" if given.dataset else "--prompt"
    is_given = bool(given.dataset) or given.prompt is not None
    for name in OWN_LENGTHS:
        if is_given and getattr(given, name) != getattr(Settings(), name):
            parser.error(f"{flag_of(name)} is for prompts that are made up, and {source} gives them")
    if given.prompt == "":
        parser.error("--prompt is empty")
    if given.dataset:
        try:
            read_dataset(given.dataset)
        except (OSError, UnreadableDataset) as error:
            parser.error(f"--dataset {given.dataset}: {getattr(error, 'strerror', None) or error}")


def check_answers(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.endpoint == "generate" and given.stream:
        parser.error("--stream: /generate answers whole; leave it out, or use --endpoint completions")
    is_streamed = given.endpoint != "generate" and given.stream is not False
    if given.batch > 1 and (is_streamed or given.endpoint == "chat"):
        parser.error(f"--batch {given.batch} is for --endpoint generate, or completions with --no-stream")
    for name in ("goodput_ttft_ms", "goodput_itl_ms"):
        if getattr(given, name) is not None and not is_streamed:
            parser.error(f"{flag_of(name)} needs streams: a whole answer shows only when it ended")


def check_files(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Checks the files to write before the run, because an error after it would be too late."""
    for flag, name in (("--json", given.json), ("--plot", given.plot)):
        if name and not Path(name).absolute().parent.is_dir():
            parser.error(f"{flag} {name}: no such folder")
    if not given.plot:
        return
    if Path(given.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        parser.error(f"--plot {given.plot} does not end in .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]'")


def make_steps(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[Settings]:
    levels = given.concurrency if isinstance(given.concurrency, list) else [given.concurrency]
    rates = given.rate or [None]
    if len(levels) > 1 and len(rates) > 1:
        parser.error("--concurrency and --rate are both lists: sweep one of them")
    shared = {name: value for name, value in vars(given).items() if name not in ("concurrency", "rate")}
    return [Settings(**shared, concurrency=level, rate=rate) for level in levels for rate in rates]
