#!/usr/bin/env python3
"""Measures levserve and the servers people would pick instead: same prompts, same client, one at a time.

Each repetition starts every contestant once, in an order that alternates, waits for its first answer, warms
it up, runs every load and stops it. Reported are medians over the repetitions. `peers.py` knows the servers,
`load.py` is the client.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import load
from figures import percentiles, summarize
from jobs import make_job
from load_options import Settings
from peers import CONTESTANTS, CannotStart, Contestant, Found, Server, Setup, running

PROMPT, OUTPUT, LONG_PROMPT = 100, 64, 900
OWN_WORDS = 16  # of a prompt, after the shared prefix
CONTEXTS = (256, 512, 1024, 2048, 4096)
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
EPILOG = """\
examples:
  python bench/compare.py --quick
  python bench/compare.py --python llama_cpp.server=/opt/llama/bin/python --hf-folder SmolLM2-135M-Instruct --repetitions 5
  python bench/compare.py --growth
  python bench/random_gguf.py --shape llama-8b --kind q4_k_m 8b.gguf && taskset -c 0,1 python bench/compare.py --model 8b.gguf --streams 1 8

what is measured, with prompts of about so many tokens, greedy, end of sequence ignored (times as `load.py --help` defines them):
  tok/s, N streams        output tokens a second of N streams at a time, 100 tokens in and 64 out
  ms between tokens       of one such stream, p50
  TTFT                    of 100 and of 900 tokens, nothing else running, p50
  TTFT, prefix known      of a prompt whose first 900 tokens were computed before
  under long prompts      of short streams while prompts of 900 tokens arrive: TTFT (a server that takes one request at a time
                          has even tokens and long waits), ms between tokens, p50 and p99, and p99 / p50
  ready                   seconds from the start to the first answer
bench/same_file.py compares levserve's and llama.cpp's engines without HTTP, on the same files and numbers of cores.
a ratio is how many times better the first is than the other: more tokens a second, or less time.

exit code: 0 all was measured, 1 something failed, 2 wrong usage, 130 Ctrl-C and 143 SIGTERM (both tell what there is).
"""


@dataclass(frozen=True, slots=True)
class Metric:
    title: str
    unit: str
    more_is_better: bool = False


def metrics_of(streams: Sequence[int]) -> dict[str, Metric]:
    """What is measured, in the order of the table."""
    return {
        **{
            f"tokens_per_second_{count}": Metric(f"{count} stream{'s' * (count > 1)}", "tok/s", True)
            for count in streams
        },
        "inter_token": Metric("between tokens, 1 stream", "ms"),
        "ttft_short": Metric(f"TTFT, {PROMPT} tokens", "ms"),
        "ttft_long": Metric(f"TTFT, {LONG_PROMPT} tokens", "ms"),
        "ttft_prefix": Metric(f"TTFT, {LONG_PROMPT} tokens known", "ms"),
        "busy_ttft": Metric("under long prompts, TTFT", "ms"),
        "busy_p50": Metric("under long prompts, p50", "ms"),
        "busy_p99": Metric("under long prompts, p99", "ms"),
        "busy_spread": Metric("under long prompts, p99 / p50", ""),
        "ready": Metric("ready", "s"),
    }


class Failed(Exception):
    """A load had wrong answers, so its numbers mean nothing."""


def figures(done: load.Load, settings: Settings) -> dict[str, Any]:
    summary = summarize(done, settings)
    if summary["failures"] or not done.rows:
        raise Failed(next(note for note in summary["notes"] if note.startswith("failed")))
    return summary


def measure_streams(server: Server, count: int, seed: str) -> dict[str, float]:
    done = server.ask(
        seed, requests=max(count, 4), concurrency=count, prompt_tokens=PROMPT, output_tokens=OUTPUT
    )
    summary = figures(done, server.settings)
    values = {f"tokens_per_second_{count}": summary["output_tokens_per_second"]}
    if count == 1:
        values |= {
            "inter_token": summary["latency_ms"]["inter-token"]["p50"],
            "ttft_short": summary["latency_ms"]["TTFT"]["p50"],
        }
    return values


def measure_long(server: Server, seed: str) -> dict[str, float]:
    done = server.ask(seed, requests=3, concurrency=1, prompt_tokens=LONG_PROMPT, output_tokens=2)
    return {"ttft_long": figures(done, server.settings)["latency_ms"]["TTFT"]["p50"]}


def measure_prefix(server: Server, seed: str) -> dict[str, float]:
    """The first request computes the prefix and does not count."""
    done = server.ask(
        seed,
        requests=4,
        concurrency=1,
        prompt_tokens=LONG_PROMPT + OWN_WORDS,
        shared_prefix=LONG_PROMPT,
        output_tokens=2,
    )
    figures(done, server.settings)
    return {"ttft_prefix": statistics.median(1e3 * row.ttft_seconds for row in done.rows if row.index > 0)}


def measure_busy(server: Server, seed: str) -> dict[str, float]:
    """Four streams at a time, every fourth with a long prompt; only the short ones are measured."""
    short = server.seeded(seed, prompt_tokens=PROMPT, output_tokens=OUTPUT)
    long = replace(short, prompt_tokens=LONG_PROMPT)
    jobs = [make_job(long if index % 4 == 3 else short, server.model, index) for index in range(16)]
    done = server.run(jobs, concurrency=4, output_tokens=OUTPUT)
    figures(done, server.settings)
    rows = [row for row in done.rows if row.index % 4 != 3]
    spread = percentiles([1e3 * gap / row.tokens_per_gap for row in rows for gap in row.gaps_seconds])
    ttft = 1e3 * statistics.median(row.ttft_seconds for row in rows)
    p50, p99 = spread["p50"], spread["p99"]
    return {"busy_ttft": ttft, "busy_p50": p50, "busy_p99": p99, "busy_spread": p99 / max(p50, 1e-3)}


def loads_of(streams: Sequence[int]) -> dict[str, Callable[[Server, str], dict[str, float]]]:
    def at(count: int) -> Callable[[Server, str], dict[str, float]]:
        return lambda server, seed: measure_streams(server, count, seed)

    return {
        **{f"{count} streams": at(count) for count in streams},
        "a long prompt": measure_long,
        "a known prefix": measure_prefix,
        "long prompts among streams": measure_busy,
    }


class Progress:
    """Prints one line a step, with the time left as the steps so far suggest."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._began = total, 0, time.monotonic()

    def step(self, text: str) -> None:
        left = (
            (time.monotonic() - self._began) / self._done * (self._total - self._done) if self._done else 0.0
        )
        about = f", about {left / 60:.0f} min left" if left else ""
        print(f"[{self._done + 1}/{self._total}{about}] {text}", file=sys.stderr, flush=True)
        self._done += 1

    def skip(self, count: int) -> None:
        self._total -= count


@dataclass
class Comparison:
    """Everything that was measured, by contestant: a list of values for each metric, one a repetition."""

    values: dict[str, dict[str, list[float]]]
    notes: list[str]

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            name: {metric: statistics.median(values) for metric, values in of.items() if values}
            for name, of in self.values.items()
        }


def ratio(metric: Metric, ours: float, theirs: float) -> float:
    """How many times better ours is."""
    return ours / theirs if metric.more_is_better else theirs / ours


def ratios(
    metrics: Mapping[str, Metric], medians: Mapping[str, Mapping[str, float]], ours: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """By metric and contestant of ours: its ratio to each peer, the best peer's name and the ratio to it."""
    result: dict[str, dict[str, Any]] = {}
    for key, metric in metrics.items():
        theirs = {
            name: values[key] for name, values in medians.items() if name not in ours and values.get(key)
        }
        for name in ours:
            if value := medians.get(name, {}).get(key):
                each = {peer: ratio(metric, value, peer_value) for peer, peer_value in theirs.items()}
                best = min(each, key=each.__getitem__, default=None)
                result.setdefault(key, {})[name] = {
                    "each": each,
                    "best_peer": best,
                    "best": each[best] if best else None,
                }
    return result


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def make_table(
    metrics: Mapping[str, Metric], medians: Mapping[str, Mapping[str, float]], ours: Sequence[str]
) -> str:
    """Markdown: a line for each metric and contestant of ours; beside each ratio, the peer's value."""
    peers = [name for name in medians if name not in ours]
    compared = ratios(metrics, medians, ours)
    lines = [["", "", "", "x best peer", *(f"x {peer}" for peer in peers)]]
    lines += [["---", "---", "---:", "---", *["---" for _ in peers]]]
    for key, metric in metrics.items():
        title = f"{metric.title}, {metric.unit}" if metric.unit else metric.title
        for name, found in compared.get(key, {}).items():
            best = f"**{number(found['best'])}** {found['best_peer']}" if found["best_peer"] else "-"
            each = {
                peer: f"{number(times)} ({number(medians[peer][key])})"
                for peer, times in found["each"].items()
            }
            lines.append(
                [title, name, number(medians[name][key]), best, *(each.get(peer, "-") for peer in peers)]
            )
            title = ""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines
    )


def choose(names: Sequence[str] | None, setup: Setup) -> tuple[list[tuple[Contestant, Found]], list[str]]:
    """The contestants that can run, and a line for each that cannot."""
    chosen: list[tuple[Contestant, Found]] = []
    skipped: list[str] = []
    for contestant in CONTESTANTS:
        if names and contestant.name not in names:
            continue
        found = contestant.find(setup)
        if isinstance(found, Found):
            chosen.append((contestant, found))
        else:
            skipped.append(f"skipped {contestant.name}: {found}; {contestant.install}")
    return chosen, skipped


def compare(
    chosen: Sequence[tuple[Contestant, Found]], setup: Setup, options: argparse.Namespace, result: Comparison
) -> None:
    """Fills `result` as it goes, so that an interrupted run can still report what it has."""
    loads = loads_of(options.streams)
    progress = Progress(len(chosen) * options.repetitions * (1 + len(loads)))
    out: set[str] = set()
    for repetition in range(options.repetitions):
        for contestant, found in chosen if repetition % 2 == 0 else chosen[::-1]:
            name = contestant.name
            if name in out:
                progress.skip(1 + len(loads))
                continue
            progress.step(f"{name}, repetition {repetition + 1}: starting")
            values = result.values.setdefault(name, {})
            log = options.out / f"{name.replace(' ', '-')}.log"
            try:
                with running(contestant, found, setup, log, options.start_timeout) as server:
                    values.setdefault("ready", []).append(server.seconds_to_ready)
                    warm_up(server, options.streams)
                    for title, measure in loads.items():
                        progress.step(f"{name}, repetition {repetition + 1}: {title}")
                        for metric, value in attempt(
                            partial(measure, server, f"{title} {repetition}"), f"{name}, {title}", result
                        ).items():
                            values.setdefault(metric, []).append(value)
            except CannotStart as error:
                out.add(name)
                result.notes.append(f"failed: {name} {error}")
                progress.skip(len(loads))


def warm_up(server: Server, streams: Sequence[int]) -> None:
    """A short load of each kind, so that first runs of programs and first touches of pages do not count."""
    for count in streams:
        server.ask(f"warm {count}", requests=count, concurrency=count, prompt_tokens=PROMPT, output_tokens=4)
    server.ask("warm long", requests=1, concurrency=1, prompt_tokens=LONG_PROMPT, output_tokens=2)


def attempt(measure: Callable[[], dict[str, float]], what: str, result: Comparison) -> dict[str, float]:
    try:
        return measure()
    except Failed as error:
        result.notes.append(f"failed: {what}: {error}")
        return {}


def grow(
    chosen: Sequence[tuple[Contestant, Found]], setup: Setup, options: argparse.Namespace, result: Comparison
) -> None:
    """Measures levserve alone: one stream after ever longer prompts, then ever more streams. Each
    contestant is started once."""
    contexts, concurrencies = (
        (CONTEXTS[:2], CONCURRENCIES[:3]) if options.quick else (CONTEXTS, CONCURRENCIES)
    )
    progress = Progress(len(chosen) * (1 + len(contexts) + len(concurrencies)))
    for contestant, found in chosen:
        name = contestant.name
        progress.step(f"{name}: starting")
        values = result.values.setdefault(name, {})
        try:
            with running(
                contestant, found, setup, options.out / f"{name.replace(' ', '-')}.log", options.start_timeout
            ) as server:
                warm_up(server, [max(concurrencies)])
                for context in contexts:
                    progress.step(f"{name}: {context} tokens of context")
                    given = dict(
                        requests=options.repetitions, concurrency=1, prompt_tokens=context, output_tokens=32
                    )
                    for metric, value in attempt(
                        partial(grown, server, given), f"{name}, {context} tokens", result
                    ).items():
                        values[f"{metric}_at_context_{context}"] = [value]
                for count in concurrencies:
                    progress.step(f"{name}: {count} streams")
                    given = dict(
                        requests=max(count, 4), concurrency=count, prompt_tokens=PROMPT, output_tokens=OUTPUT
                    )
                    for metric, value in attempt(
                        partial(grown, server, given), f"{name}, {count} streams", result
                    ).items():
                        values[f"{metric}_at_streams_{count}"] = [value]
        except CannotStart as error:
            result.notes.append(f"failed: {name} {error}")


def grown(server: Server, given: Mapping[str, Any]) -> dict[str, float]:
    summary = figures(
        server.ask(f"grow {given['prompt_tokens']} {given['concurrency']}", **given), server.settings
    )
    latency = summary["latency_ms"]
    speed = summary["output_tokens_per_second"]
    return {
        "ttft": latency["TTFT"]["p50"],
        "inter_token": latency["inter-token"]["p50"],
        "tokens_per_second": speed,
    }


def describe_machine() -> dict[str, Any]:
    told = subprocess.run(["lscpu"], capture_output=True, text=True).stdout if shutil.which("lscpu") else ""
    names = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("Model name:")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load_average_before": os.getloadavg()[0],
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [contestant.name for contestant in CONTESTANTS]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help="contestants to measure: " + ", ".join(names)
    )
    parser.add_argument(
        "--repetitions", type=int, default=3, metavar="N", help="starts of each contestant (default: 3)"
    )
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        metavar="N",
        help="streams at a time (default: 1 8 32)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one repetition of 1 and 4 streams: to see that it works, not to publish",
    )
    parser.add_argument(
        "--growth",
        action="store_true",
        help="levserve alone: cost against context and against concurrency, as a plot",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FILE",
        help="GGUF file for levserve and llama.cpp (default: the bundled model)",
    )
    parser.add_argument(
        "--q4-0",
        type=Path,
        metavar="FILE",
        help="the same model in Q4_0, llama.cpp's fastest format, for one more peer",
    )
    parser.add_argument(
        "--hf-folder",
        type=Path,
        metavar="DIR",
        help="the same model as a Hugging Face folder, for vLLM and transformers",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="interpreter that a peer is installed for",
    )
    parser.add_argument(
        "--llama-server", metavar="PATH", help="the llama-server program (default: the one on PATH)"
    )
    parser.add_argument(
        "--levserve-flags", default="", metavar="FLAGS", help="more flags for levserve, as one text"
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=600,
        metavar="S",
        help="seconds a server may take to its first answer",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench-results"), metavar="DIR", help="for JSON, chart and logs"
    )
    options = parser.parse_args(argv)
    if options.quick:
        options.repetitions, options.streams = 1, [1, 4]
    if options.repetitions < 1 or min(options.streams) < 1:
        parser.error("--repetitions and --streams are at least 1")
    for given in options.python:
        if given.partition("=")[0] not in names or not given.partition("=")[2]:
            parser.error(f"--python {given}: write NAME=PATH, NAME one of {', '.join(names)}")
    for flag, path in (
        ("--model", options.model),
        ("--q4-0", options.q4_0),
        ("--hf-folder", options.hf_folder),
    ):
        if path and not path.exists():
            parser.error(f"{flag} {path}: no such file or folder")
    return options


def make_setup(options: argparse.Namespace) -> Setup:
    pythons = dict(given.partition("=")[::2] for given in options.python)
    if options.llama_server:
        pythons["llama-server"] = options.llama_server
    streams = max(CONCURRENCIES) if options.growth else max(options.streams)
    flags = shlex.split(options.levserve_flags)
    threads = len(os.sched_getaffinity(0))
    return Setup(
        options.model or find_bundled(),
        options.hf_folder,
        options.q4_0,
        streams,
        threads,
        tuple(flags),
        pythons,
    )


def find_bundled() -> Path:
    """The model levserve serves by default, fetched if need be."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from levserve.settings.parse import parse_settings
    from levserve.weights import bundled

    return bundled.find_bundled(
        parse_settings([], {}).cache_path, lambda progress: print(progress, file=sys.stderr)
    )


class Ended(BaseException):
    """A signal ended the run."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP unwind as Ctrl-C does, so that servers are stopped."""

    def leave(number: int, _: object) -> None:
        raise Ended(number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    setup, machine = make_setup(options), describe_machine()
    ours = [contestant.name for contestant in CONTESTANTS if contestant.is_ours]
    chosen, skipped = choose(
        [name for name in options.only or ours if name in ours] if options.growth else options.only, setup
    )
    print("\n".join(skipped), file=sys.stderr)
    result = Comparison({}, list(skipped))
    code = 0
    with ended_by_signals():
        try:
            (grow if options.growth else compare)(chosen, setup, options, result)
        except Ended as ended:
            code = 128 + ended.number
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
    if code:
        result.notes.append("ended early: this is what there was")
    report(options, setup, machine, chosen, result, ours)
    return code or int(any(note.startswith("failed") for note in result.notes))


def report(
    options: argparse.Namespace,
    setup: Setup,
    machine: Mapping[str, Any],
    chosen: Sequence[tuple[Contestant, Found]],
    result: Comparison,
    ours: Sequence[str],
) -> None:
    metrics, medians = metrics_of(options.streams), result.medians()
    name = "growth" if options.growth else "compare"
    document = {
        "machine": machine,
        "model": setup.gguf.name,
        "repetitions": options.repetitions,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {contestant.name: found.version for contestant, found in chosen},
        "notes": result.notes,
        "metrics": {key: asdict(metric) for key, metric in metrics.items()},
        "medians": medians,
        "values": result.values,
        "ratios": {} if options.growth else ratios(metrics, medians, ours),
    }
    (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"{machine['cpu']}, {machine['cores']} cores; {setup.gguf.name}; medians of {options.repetitions}\n"
    )
    if options.growth:
        print(json.dumps(medians, indent=1))
    else:
        print(make_table(metrics, medians, ours))
    for note in result.notes:
        print("\n" + note)
    print(f"\n{options.out}/{name}.json")
    if not any(medians.values()):
        return
    try:
        import chart
    except ImportError:
        print("no chart: pip install '.[bench]'")
        return
    (chart.draw_growth if options.growth else chart.draw_comparison)(document, options.out / f"{name}.png")
    print(f"{options.out}/{name}.png")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
