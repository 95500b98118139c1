#!/usr/bin/env python3
"""Measures what a front costs (Ray Serve, nginx, a gateway): the same requests with and without it, by turns.

    python bench/front.py --front http://127.0.0.1:8000 --direct http://127.0.0.1:36389,http://127.0.0.1:39983

`--direct` names the servers behind the front. First one client streams alone, then `--clients` stream at
the same time. Both are repeated by turns directly and through the front, so that changes on the machine
affect both alike. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from http_client import Address, connect, first_model, send


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--front", required=True, help="Address of the front.")
    parser.add_argument("--direct", required=True, help="Addresses of the servers behind it, with commas.")
    parser.add_argument("--turns", type=int, default=5, help="How often each part is measured on each way.")
    parser.add_argument("--requests", type=int, default=20, help="Requests of one turn.")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()
    front = [Address(options.front)]
    direct = [Address(url) for url in options.direct.split(",")]
    body = make_body(first_model(direct[0])[0], options.max_tokens)
    for addresses in (front, direct):
        run_alone(addresses, body, options.requests)  # warms up
    print(f"{'':34}{'direct':>10}{'front':>10}{'ratio':>8}")
    firsts, wholes, rates = [], [], []
    for _ in range(options.turns):
        for addresses in (direct, front):
            first, whole = run_alone(addresses, body, options.requests)
            firsts.append(first)
            wholes.append(whole)
            rates.append(run_together(addresses, body, options.requests, options.clients))
    report("first event, one client, ms", firsts, 1000)
    report("whole stream, one client, ms", wholes, 1000)
    report(f"requests/s, {options.clients} clients", rates, 1)


def make_body(model: str, max_tokens: int) -> bytes:
    fields = {"model": model, "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
    return json.dumps({**fields, "max_tokens": max_tokens, "stream": True}).encode()


def run_alone(addresses: list[Address], body: bytes, num_requests: int) -> tuple[float, float]:
    """Median seconds to the first event and to the end, of one request after another."""
    times = [stream(address, body) for address in take(addresses, num_requests)]
    return statistics.median(first for first, _ in times), statistics.median(whole for _, whole in times)


def run_together(addresses: list[Address], body: bytes, num_requests: int, num_clients: int) -> float:
    """Requests per second of several clients."""
    start = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as clients:
        list(clients.map(lambda address: stream(address, body), take(addresses, num_requests)))
    return num_requests / (time.perf_counter() - start)


def take(addresses: list[Address], count: int) -> Iterator[Address]:
    return itertools.islice(itertools.cycle(addresses), count)


def stream(address: Address, body: bytes) -> tuple[float, float]:
    """Seconds to the first bytes of a stream and to its end. Exits if it does not end as it should."""
    start = time.perf_counter()
    with contextlib.closing(connect(address)) as connection:
        with send(connection, address, "/v1/completions", body) as response:
            text = response.read1()
            first = time.perf_counter() - start
            text += response.read()
    if response.status != 200 or not text.endswith(b"data: [DONE]\n\n"):
        raise SystemExit(f"front.py: {address.url} answers {response.status} {text[-200:]!r}")
    return first, time.perf_counter() - start


def report(what: str, values: list[float], scale: float) -> None:
    direct, front = (statistics.median(values[way::2]) * scale for way in (0, 1))
    print(f"{what:34}{direct:10.1f}{front:10.1f}{front / direct:8.2f}")


if __name__ == "__main__":
    main()
