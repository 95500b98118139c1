#!/usr/bin/env python3
"""Measures replicas behind nginx: the share of prompts each policy finds cached, and what lost replicas cost.

    python bench/replicas.py                              three servers of the bundled model
    python bench/replicas.py --step-ms 20 --prefill-us 200 --json run.json
    python bench/replicas.py --chaos                      kills, drains and restarts under load as well

Clients hold talks of several turns through nginx with deploy/nginx/replicas.conf and read every answer
as a stream. With --step-ms the servers are those of bench/host.py: levserve around a device that only
keeps time, so that three of them can share a machine with few cores and still take as long as three
devices would. Each policy gets talks of its own. Prints the ratio of each policy's prefix hits to
round-robin's. The exit code is 1 if the hash's ratio is below 1.3, or if --chaos lost more requests than
it may. Flags that are not listed are levserve's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fleet_replica import PAGE, Costs
from fleet_servers import Server, start_nginx, start_servers
from http_client import Address, connect, first_model, send
from prompts import WORDS
from replicas_chaos import run_chaos

OPENING = re.compile(rb'(?s)^.*?"role"\s*:\s*"user"\s*,\s*"content"\s*:\s*"[^"\\]*(?:\\.[^"\\]*)*"')
LEAST_RATIO = 1.3
POLICIES = ("round_robin", "least_conn", "hash")
PROMPT_SIZES = (128, 512, 1024)  # words of the prompts from which costs are measured
REPETITIONS = 5


@dataclass
class TalkRun:
    """One client's talk, and what was measured of each turn."""

    number: int
    begins: float
    key: str = ""
    prompts: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    thinking: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def main() -> int:
    options, flags = _parser().parse_known_args()
    device = (options.step_ms, options.prefill_us) if options.step_ms else None
    if not device:
        flags += ["--max-seq-len", "2048", "--kv-pages", str(options.cache_tokens // PAGE)]
    flags += ["--max-running", str(options.rows)]
    is_good = True
    with start_servers(options.replicas, flags, device) as servers:
        run: dict[str, Any] = {"addresses": [f"127.0.0.1:{server.port}" for server in servers]}
        options.model = first_model(Address(servers[0].url))[0]
        run["costs"] = asdict(measure_costs(servers[0], options))
        print(f"measured of one: {run['costs']}", flush=True)
        run["policies"] = {policy: run_policy(servers, policy, options) for policy in POLICIES}
        run["system_tokens"] = options.system_words
        base = run["policies"]["round_robin"]["cached"]
        for policy, result in run["policies"].items():
            print(
                f"{policy}: {result['cached']:.1%} of prompt tokens cached, {result['cached'] / base:.2f} x round-robin's; "
                f"{result['per_second']:.2f} requests/s, first token {result['ttft'] * 1e3:.0f} ms, whole {result['seconds']:.2f} s"
            )
        is_good = run["policies"]["hash"]["cached"] >= LEAST_RATIO * base
        if options.json:
            Path(options.json).write_text(json.dumps(run))
        if options.chaos:
            with start_nginx(servers, "hash") as url:
                is_good = run_chaos(servers, url, options.model, options.talks) and is_good
    return 0 if is_good else 1


def run_policy(servers: list[Server], policy: str, options: argparse.Namespace) -> dict[str, Any]:
    before = _cache_counts(servers)
    rng = random.Random(f"{policy} {options.seed}")
    talks = [TalkRun(number, rng.uniform(0, options.ramp)) for number in range(options.talks)]
    with start_nginx(servers, policy) as url:
        began = time.perf_counter()
        with ThreadPoolExecutor(len(talks)) as clients:
            list(clients.map(lambda talk: hold_talk(talk, url, policy, began, options), talks))
        wall = time.perf_counter() - began
    prompt_tokens, hit_tokens = (now - then for now, then in zip(_cache_counts(servers), before))
    num_asked = options.talks * options.turns
    return {
        "cached": hit_tokens / prompt_tokens,
        "per_second": num_asked / wall,
        "ttft": statistics.fmean(value for talk in talks for value in talk.ttft),
        "seconds": statistics.fmean(value for talk in talks for value in talk.seconds),
        "talks": [asdict(talk) for talk in talks],
    }


def hold_talk(talk: TalkRun, url: str, policy: str, began: float, options: argparse.Namespace) -> None:
    """Holds a talk. The assistant's turns are made up too: a model's answers differ from run to run."""
    rng = random.Random(f"{policy} {options.seed} {talk.number}")
    system = " ".join(random.Random(f"system {policy}").choices(WORDS, k=options.system_words))
    messages = [{"role": "system", "content": system}]
    time.sleep(max(0.0, began + talk.begins - time.perf_counter()))
    for turn in range(options.turns):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=options.turn_words))})
        answer = rng.randint(options.answer_tokens // 2, options.answer_tokens * 3 // 2)
        body = json.dumps(
            {"model": options.model, "messages": messages, "max_tokens": answer, **STREAM}
        ).encode()
        if match := OPENING.match(body):
            talk.key = match[0].decode()
        sent = time.perf_counter()
        first, prompt_tokens = ask(url, body)
        talk.seconds.append(time.perf_counter() - sent)
        talk.ttft.append(first - sent)
        talk.prompts.append(prompt_tokens)
        talk.answers.append(answer)
        messages.append({"role": "assistant", "content": " ".join(rng.choices(WORDS, k=options.turn_words))})
        talk.thinking.append(rng.expovariate(1 / options.think))
        if turn + 1 < options.turns:
            time.sleep(talk.thinking[-1])


STREAM = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0}


def ask(url: str, body: bytes) -> tuple[float, int]:
    """When the first token came, and how many tokens the prompt had; exits if the answer is not whole."""
    address = Address(url)
    first, prompt_tokens, is_whole = 0.0, 0, False
    with contextlib.closing(connect(address)) as connection:
        response = send(connection, address, "/v1/chat/completions", body)
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event.get("usage"):
                    prompt_tokens = event["usage"]["prompt_tokens"]
                elif not first and event["choices"][0]["delta"].get("content"):
                    first = time.perf_counter()
            is_whole |= line.startswith(b"data: [DONE]")
    if response.status != 200 or not is_whole:
        raise SystemExit(f"an answer was not whole: {response.status}")
    return first or time.perf_counter(), prompt_tokens


def measure_costs(server: Server, options: argparse.Namespace) -> Costs:
    """Measures one replica alone: prefill of three lengths, and a step with one stream and with all rows."""
    times: dict[int, float] = {}
    for place, words in enumerate((PROMPT_SIZES[0], *PROMPT_SIZES)):  # the first warms up
        samples = []
        for number in range(REPETITIONS):
            # No prompt is sent twice: the prefix cache would know it.
            rng = random.Random(f"{place} {number} {options.seed}")
            text = " ".join(rng.choices(WORDS, k=words))
            message = {"role": "user", "content": text}
            body = json.dumps({"model": options.model, "messages": [message], "max_tokens": 1, **STREAM})
            sent = time.perf_counter()
            first, tokens = ask(server.url, body.encode())
            samples.append(first - sent)
        times[tokens] = min(samples)  # the time when nothing else disturbs it
    least, most = min(times), max(times)
    token_seconds = (times[most] - times[least]) / (most - least)
    overhead = max(times[least] - least * token_seconds, 0.002)
    one, all_rows = (_step_seconds(server, count, options) for count in (1, options.rows))
    row_seconds = max(all_rows - one, 0.0) / max(options.rows - 1, 1)
    return Costs(
        prefill_token_seconds=token_seconds,
        least_prefill_seconds=0.002,
        step_seconds=one - row_seconds,
        row_seconds=row_seconds,
        round_steps=options.round_steps,
        max_running=options.rows,
        cache_tokens=options.cache_tokens,
        host_seconds=overhead / 2,
    )


def _step_seconds(server: Server, num_streams: int, options: argparse.Namespace) -> float:
    """Seconds of a step, from answers of two lengths, so that a request's other costs cancel out.

    The first of the three runs leaves the prompt in the prefix cache, where the other two find it.
    """
    walls = []
    short, long = options.round_steps * 2 + 1, options.round_steps * 8 + 1
    for length in (short, short, long):
        message = {"role": "user", "content": "Go on."}
        body = json.dumps({"model": options.model, "messages": [message], "max_tokens": length, **STREAM})
        began = time.perf_counter()
        with ThreadPoolExecutor(num_streams) as clients:
            list(clients.map(ask, [server.url] * num_streams, [body.encode()] * num_streams))
        walls.append(time.perf_counter() - began)
    seconds: float = (walls[2] - walls[1]) / (long - short)
    return seconds


def _cache_counts(servers: list[Server]) -> tuple[float, float]:
    names = ("levserve_prompt_tokens_total", "levserve_prefix_hit_tokens_total")
    prompts, hits = (sum(server.metric(name) for server in servers) for name in names)
    return prompts, hits


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4, help="--max-running of each")
    parser.add_argument("--talks", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system-words", type=int, default=32)
    parser.add_argument("--turn-words", type=int, default=60)
    parser.add_argument("--answer-tokens", type=int, default=16, help="in the mean")
    parser.add_argument("--think", type=float, default=0.5, help="mean seconds between turns")
    parser.add_argument("--ramp", type=float, default=3.0, help="seconds in which talks begin")
    parser.add_argument("--step-ms", type=float, default=0.0, help="of a device that only keeps time")
    parser.add_argument("--prefill-us", type=float, default=200.0, help="of that device")
    parser.add_argument("--round-steps", type=int, default=8)
    parser.add_argument(
        "--cache-tokens",
        type=int,
        default=16_000,
        help="that a replica's pool has; the timed device's has that or more",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write what was measured, for bench/fleet.py --check")
    parser.add_argument("--chaos", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
