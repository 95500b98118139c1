"""`levserve batch`: answers a file of requests, without a server."""

from __future__ import annotations

import os
import sys
import time
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from contextlib import closing

from levserve.api.admission_queue import AdmissionQueue
from levserve.api.opening import OpenedDevice, open_device
from levserve.batch.endpoints import Limits
from levserve.batch.line import InputLine, find_custom_id
from levserve.batch.ordering import MAX_LINES, order_lines
from levserve.batch.output import Output, open_output
from levserve.batch.runner import Interrupted, Runner
from levserve.batch.seen import SeenIds
from levserve.batch.source import Source
from levserve.batch.tally import Tally
from levserve.errors import ConfigError, StartupError
from levserve.settings.settings import Settings
from levserve.terminal.options import closing_unless_interrupted, make_parser, read_settings, show_loading
from levserve.terminal.screen import has_escapes, redraw

DESCRIPTION = """\
Answers a file of requests in OpenAI's batch format, each on a line of its own:

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"model": "...", "messages": [...]}}

  levserve batch in.jsonl out.jsonl                       with the bundled model
  levserve batch in.jsonl out.jsonl --model Qwen/Qwen3-0.6B
  levserve batch gs://bucket/in.jsonl gs://bucket/out.jsonl

The url is /v1/chat/completions, /v1/completions, /v1/embeddings or /loglikelihood. Each result has the body
that the server would have answered with. Results are written as they end; find them by custom_id. A line
whose custom_id an earlier one has is not run; its result is an error.
After an interruption, run the same command again; lines that have a result are skipped.
"""
FAILED_LINES = 3
"""Exit code of a batch that is complete, with requests that failed."""
TERMINAL_SECONDS, LOG_SECONDS = 0.5, 30.0
"""Between two progress reports, in a terminal that can redraw a line and elsewhere."""


def main(argv: Sequence[str]) -> int:
    parser = make_parser("batch", DESCRIPTION)
    parser.add_argument("input", help="The file of requests, or its gs://, s3:// or http(s):// address.")
    parser.add_argument("output", help="The file of results, or its gs:// or s3:// address.")
    parser.add_argument(
        "--model", metavar="NAME", help="Model to use, given as for levserve. [default: the bundled model]"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="Start over; the first new result replaces any existing results.",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=MAX_LINES,
        metavar="N",
        help="Lines that are sorted together, so that common beginnings are computed once. [%(default)s]",
    )
    parser.add_argument(
        "--seed",
        dest="setting:seed",
        default=SUPPRESS,
        metavar="N",
        help="Makes lines without a seed repeatable.",
    )
    options = parser.parse_args(argv)
    if options.window < 1:
        raise ConfigError("--window must be at least 1")
    if "-" in (options.input, options.output):
        raise ConfigError("'-' is no file: a batch needs an input and an output that can be read again")
    if options.input == options.output or _are_one_file(options.input, options.output):
        raise ConfigError("the input and the output are the same file")
    settings = read_settings(options)
    source = Source(options.input)
    with open_output(options.output, settings.cache_path, overwrites=options.overwrite) as output:
        tally = Tally(source.num_bytes)
        tally.num_failed_before = output.results.num_failed
        if _has_work(source, output, settings):
            with show_loading() as report:
                opened = open_device(settings, report)
            with closing_unless_interrupted(opened.close):
                run(source, output, opened, tally, options.window)
        else:  # all results exist; finding that out needs no model
            tally.num_before = output.results.num_results
        output.finish()
        for line in tally.describe_end():
            print(line, file=sys.stderr)
        return FAILED_LINES if output.results.num_failed else 0


def run(source: Source, output: Output, opened: OpenedDevice, tally: Tally, window: int) -> None:
    """Runs the lines that have no result yet. Raises `StartupError` if the device fails."""
    engine, settings = opened.registry.engine, opened.settings
    limits = Limits(engine.admission, min(settings.max_running, engine.max_inflight))
    runner = Runner(
        opened.registry, settings, AdmissionQueue(engine), limits, max_sequences=engine.max_inflight
    )
    lines = order_lines(_not_done(source, output, tally, settings), settings.max_body_bytes, window)
    reports = Reports()
    tally.start()
    try:
        with closing(runner.run(lines)) as results:
            for result in results:
                output.write(result.result)
                tally.add(result)
                reports.show(tally)
    except Interrupted as error:
        raise StartupError("the device failed; run the same command again to continue") from error
    finally:
        reports.end()


class Reports:
    """Shows progress on stderr: one line that is redrawn in a terminal, a new line now and then elsewhere."""

    def __init__(self) -> None:
        self._is_redrawn = has_escapes()
        self._next = time.monotonic() + (0 if self._is_redrawn else LOG_SECONDS)

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (TERMINAL_SECONDS if self._is_redrawn else LOG_SECONDS)
        if self._is_redrawn:
            redraw(tally.describe_progress())
        else:
            print(tally.describe_progress(), file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_redrawn:
            redraw("")


def _are_one_file(first: str, second: str) -> bool:
    return os.path.exists(first) and os.path.exists(second) and os.path.samefile(first, second)


def _has_work(source: Source, output: Output, settings: Settings) -> bool:
    return any(not output.done.has(line) for line in source.lines(settings.max_body_bytes))


def _not_done(source: Source, output: Output, tally: Tally, settings: Settings) -> Iterator[InputLine]:
    """The lines without a result. Of those with the same custom_id, the first in the file is run."""
    seen = SeenIds()
    for line in source.lines(settings.max_body_bytes):
        custom_id = find_custom_id(line)
        is_repeated = custom_id is not None and not seen.add(custom_id)
        if output.done.has(line):
            tally.skip(line.num_bytes)
        else:
            yield line._replace(is_repeated=is_repeated)
