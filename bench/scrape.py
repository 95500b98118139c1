#!/usr/bin/env python3
"""Measures what scraping costs a server: CPU time per page, as often as an endpoint picker scrapes.

    python bench/scrape.py
    python bench/scrape.py --streams 4 --per-second 20 --seconds 20 --max-running 8

Starts a levserve, keeps it busy with streams if wanted, and reads its CPU time while nobody scrapes and while a client
scrapes each page over one kept connection. Flags that are not listed are levserve's own. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from fleet_servers import Server, start_servers
from http_client import Address, first_model

PAGES = ("/metrics", "/metrics/router")
LIMIT_MS = 0.5  # a scrape every 50 ms then takes 1 % of a core
QUIET_SHARE, SETTLE_SECONDS = 0.03, 300


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--per-second", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=10, help="for each page")
    parser.add_argument("--streams", type=int, default=0, help="requests that run meanwhile")
    options, flags = parser.parse_known_args()
    is_within = True
    with start_servers(1, [*flags, "--vllm-metrics", "true"]) as (server,):
        settle(server)
        with keep_busy(server, options.streams):
            idle = measure(server, None, options)
            print(f"{options.streams} streams, no scrapes: {idle:.2%} of a core")
            for page in PAGES:
                both = measure(server, page, options)
                milliseconds = (both - idle) / options.per_second * 1000
                is_within = page != PAGES[-1] or milliseconds <= LIMIT_MS
                print(
                    f"{page}: {milliseconds:.2f} ms of CPU a scrape, {both - idle:.2%} of a core at "
                    f"{options.per_second:g} a second"
                )
    return 0 if is_within else 1


def settle(server: Server) -> None:
    """Waits until the server has compiled the programs that it compiles after it is ready."""
    deadline = time.perf_counter() + SETTLE_SECONDS
    share = 1.0
    while share > QUIET_SHARE and time.perf_counter() < deadline:
        cpu, began = server.cpu_seconds(), time.perf_counter()
        time.sleep(3)
        share = (server.cpu_seconds() - cpu) / (time.perf_counter() - began)
    if share > QUIET_SHARE:
        print(f"the server still takes {share:.0%} of a core after {SETTLE_SECONDS} s")


def measure(server: Server, page: str | None, options: argparse.Namespace) -> float:
    """The server's CPU seconds per second, with a scraper or without."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    cpu, began = server.cpu_seconds(), time.perf_counter()
    for number in range(round(options.seconds * options.per_second)):
        time.sleep(max(0.0, began + number / options.per_second - time.perf_counter()))
        if page is not None:
            connection.request("GET", page)
            assert len(connection.getresponse().read()) > 500
    connection.close()
    return (server.cpu_seconds() - cpu) / (time.perf_counter() - began)


@contextlib.contextmanager
def keep_busy(server: Server, num_streams: int) -> Iterator[None]:
    is_over = threading.Event()
    body = json.dumps(
        {
            "model": first_model(Address(server.url))[0],
            "prompt": "Once upon a time",
            "max_tokens": 200,
            "ignore_eos": True,
        }
    )

    def ask() -> None:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
        while not is_over.is_set():
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            connection.getresponse().read()
        connection.close()

    threads = [threading.Thread(target=ask) for _ in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    sys.exit(main())
