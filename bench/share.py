#!/usr/bin/env python3
"""Measures how much of the engine's own speed arrives over HTTP: the server with streaming clients, then its
engine alone.

    python bench/share.py
    python bench/share.py --loads 64,512,128 256,512,128 256,128,512 --output-spread 0.5 --clients 8 --model ./my-model
    python bench/share.py --loads 256,562,562 --requests 1 --prompt-spread 0.82 --output-spread 0.82 --temperature 0.6 --clients 8

The engine alone is the device thread's loop and nothing else: it takes the next request when one ends
and discards the tokens. What is missing over HTTP was therefore spent in Python's other threads. Flags
that are not listed are levserve's own.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from host import run_clients
from prompts import spread_length

from levserve.device.delivery import AddressedBatch, Delivery
from levserve.device.model_loop import ModelLoop
from levserve.engine.messages import Submit
from levserve.engine.stream import TokenStream
from levserve.models.build import Loaded
from levserve.models.load import load
from levserve.observe.metrics import Metrics
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.server import freeze_loaded_objects
from levserve.settings.parse import parse_settings

COMPLETE = "programs are compiled"
START_SECONDS = 600


class Streams(NamedTuple):
    """A load: requests at a time, and the mean tokens in and out of each."""

    at_once: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.at_once} streams, {self.prompt_tokens} tokens in, {self.output_tokens} out"


class Alone(Delivery):
    """Takes the place of HTTP: when a request ends, the next one starts at once."""

    def __init__(self, loaded: Loaded, options: argparse.Namespace) -> None:
        self._model_loop = ModelLoop(loaded.scheduler, loaded.runner, loaded.pace, self, Metrics())
        self._options = options
        self._random = random.Random(0)
        self._numbers = count()
        self._requests: deque[GenerationRequest] = deque()
        self._nobody = TokenStream((), lambda request_id, finish: None)

    def run(self, streams: Streams, num_requests: int) -> float:
        """Tokens a second."""
        self._requests = deque(self._request(streams) for _ in range(num_requests))
        num_tokens = sum(request.max_tokens for request in self._requests)
        freeze_loaded_objects()  # as the server does when it is ready
        start = time.perf_counter()
        for _ in range(streams.at_once):
            self._begin()
        while self._model_loop.has_work:
            self._model_loop.step()
        return num_tokens / (time.perf_counter() - start)

    def send(self, updates: Sequence[AddressedBatch]) -> None:
        for _, _, batch in updates:
            if batch.finish is not None:
                self._begin()

    def _begin(self) -> None:
        if self._requests:
            self._model_loop.accept(Submit(self._requests.popleft(), self._nobody, 0, time.monotonic(), ""))

    def _request(self, streams: Streams) -> GenerationRequest:
        prompt_length = spread_length(streams.prompt_tokens, self._options.prompt_spread, self._random)
        prompt = tuple(self._random.choices(range(300, 2000), k=prompt_length))
        length = spread_length(streams.output_tokens, self._options.output_spread, self._random)
        sampling = Sampling(self._options.temperature, seed=self._random.getrandbits(64))
        return GenerationRequest(str(next(self._numbers)), prompt, length, sampling)


def main() -> int:
    options, flags = _parser().parse_known_args()
    num_rows = max(streams.at_once for streams in options.loads)
    flags += ["--max-running", str(num_rows)]
    over_http = _measure_http(options, flags)
    loaded = load(parse_settings(flags, {}), Metrics(), report=_tell)
    loaded.runner.programs.start_background()
    while not loaded.runner.programs.is_complete:
        time.sleep(0.1)
    while loaded.runner.programs.has_cold:
        loaded.runner.warm_one()
    alone = Alone(loaded, options)
    for streams, http in zip(options.loads, over_http):
        own = [alone.run(streams, streams.at_once * options.requests) for _ in range(options.repetitions)]
        print(
            f"{streams}: HTTP {_shown(http)} tok/s, the engine alone {_shown(own)}, share {max(http) / max(own):.0%}",
            flush=True,
        )
    loaded.runner.programs.stop()
    return 0


def _measure_http(options: argparse.Namespace, flags: list[str]) -> list[list[float]]:
    url = f"http://127.0.0.1:{options.port}"
    with tempfile.NamedTemporaryFile("w") as log:
        command = [sys.executable, "-m", "levserve", "--port", str(options.port), *flags]
        server = subprocess.Popen(command, stderr=log)
        try:
            _wait_for(COMPLETE, Path(log.name), server)
            found = []
            for streams in options.loads:
                found.append([_clients_speed(url, streams, options) for _ in range(options.repetitions)])
                _tell(f"{streams}: HTTP {_shown(found[-1])} tok/s")
            return found
        finally:
            server.terminate()
            server.wait()


def _clients_speed(url: str, streams: Streams, options: argparse.Namespace) -> float:
    given = argparse.Namespace(**streams._asdict(), clients=options.clients)
    num_requests = streams.at_once * options.requests
    more = [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in ("prompt_spread", "output_spread", "temperature")
    ]
    tokens, seconds = run_clients(url, given, streams.at_once, num_requests, *more)
    return tokens / seconds


def _wait_for(line: str, log: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while line not in log.read_text():
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


def _streams(text: str) -> Streams:
    return Streams(*map(int, text.split(",", 2)))


def _shown(speeds: Sequence[float]) -> str:
    return " and ".join(f"{speed:,.0f}" for speed in sorted(speeds))


def _tell(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    loads = [Streams(8, 128, 128), Streams(32, 128, 128)]
    parser.add_argument(
        "--loads",
        type=_streams,
        nargs="+",
        default=loads,
        metavar="STREAMS,IN,OUT",
        help="default: 8,128,128 32,128,128",
    )
    parser.add_argument(
        "--prompt-spread",
        type=float,
        default=0.0,
        help="by what share prompts differ in length (default: %(default)s)",
    )
    parser.add_argument(
        "--output-spread",
        type=float,
        default=0.0,
        help="by what share outputs differ in length (default: %(default)s)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=12, help="for each stream (default: %(default)s)")
    parser.add_argument(
        "--repetitions",
        type=int,
        default=2,
        help="of each measurement; the best counts (default: %(default)s)",
    )
    parser.add_argument(
        "--clients", type=int, default=1, help="processes that share the streams (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8765)
    return parser


if __name__ == "__main__":
    sys.exit(main())
