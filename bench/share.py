#!/usr/bin/env python3
"""Measures how much of the engine's own speed arrives over HTTP: the server with streaming clients, then its engine alone.

    python bench/share.py --streams 8 32
    python bench/share.py --streams 64 256 --prompt-tokens 512 --output-tokens 128 --clients 8 --model ./my-model

The engine alone is the device thread's loop and nothing else: it takes the next request when one ends and hands its tokens to nobody.
So what is missing over HTTP went to Python's other threads. Flags that are not listed are levserve's own.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from host import run_clients  # noqa: E402

from levserve.engine.courier import Courier, News  # noqa: E402
from levserve.engine.engine import Submit  # noqa: E402
from levserve.engine.lane import Lane  # noqa: E402
from levserve.engine.startup import Loaded, load  # noqa: E402
from levserve.engine.stream import TokenStream  # noqa: E402
from levserve.metrics import Metrics  # noqa: E402
from levserve.options import parse_settings  # noqa: E402
from levserve.schedule.request import GenerationRequest, Sampling  # noqa: E402

COMPLETE = "programs are compiled"
START_SECONDS = 600


class Alone(Courier):
    """In place of HTTP: who ends is followed by the next at once."""

    def __init__(self, loaded: Loaded, options: argparse.Namespace) -> None:
        self._lane = Lane(loaded.scheduler, loaded.runner, loaded.pace, self, Metrics())
        self._options = options
        self._random = random.Random(0)
        self._numbers = count()
        self._num_left = 0
        self._nobody = TokenStream((), lambda request_id, finish: None)

    def run(self, num_streams: int, num_requests: int) -> float:
        """Tokens a second."""
        self._num_left = num_requests
        num_tokens: int = num_requests * self._options.output_tokens
        start = time.perf_counter()
        for _ in range(num_streams):
            self._begin()
        while self._lane.has_work:
            self._lane.turn()
        return num_tokens / (time.perf_counter() - start)

    def send(self, news: Sequence[News]) -> None:
        for _, _, batch in news:
            if batch.finish is not None:
                self._begin()

    def _begin(self) -> None:
        if not self._num_left:
            return
        self._num_left -= 1
        prompt = tuple(self._random.choices(range(300, 2000), k=self._options.prompt_tokens))
        request = GenerationRequest(str(next(self._numbers)), prompt, self._options.output_tokens, Sampling(temperature=0.0))
        self._lane.accept(Submit(request, self._nobody, 0, time.monotonic(), ""))


def main() -> int:
    options, flags = _parser().parse_known_args()
    flags += ["--max-running", str(max(options.streams))]
    over_http = _measure_http(options, flags)
    loaded = load(parse_settings(flags, {}), Metrics(), rows=max(options.streams), report=_tell)
    loaded.runner.programs.start_background()
    while not loaded.runner.programs.is_complete:
        time.sleep(0.1)
    while loaded.runner.programs.has_cold:
        loaded.runner.warm_one()
    alone = Alone(loaded, options)
    for num_streams, http in zip(options.streams, over_http):
        own = [alone.run(num_streams, num_streams * options.rounds) for _ in range(options.repetitions)]
        print(f"{num_streams} streams, {options.prompt_tokens} tokens in, {options.output_tokens} out: HTTP {_shown(http)} tok/s, "
              f"the engine alone {_shown(own)}, share {max(http) / max(own):.0%}", flush=True)  # fmt: skip
    loaded.runner.programs.stop()
    return 0


def _measure_http(options: argparse.Namespace, flags: list[str]) -> list[list[float]]:
    url = f"http://127.0.0.1:{options.port}"
    with tempfile.NamedTemporaryFile("r") as log:
        command = [sys.executable, "-m", "levserve.cli", "--port", str(options.port), *flags]
        server = subprocess.Popen(command, stderr=open(log.name, "w"))
        try:
            _wait_for(COMPLETE, Path(log.name), server)
            found = []
            for options.num_streams in options.streams:
                found.append([_clients_speed(url, options) for _ in range(options.repetitions)])
                _tell(f"{options.num_streams} streams over HTTP: {_shown(found[-1])} tok/s")
            return found
        finally:
            server.terminate()
            server.wait()


def _clients_speed(url: str, options: argparse.Namespace) -> float:
    tokens, seconds = run_clients(url, options, options.num_streams, options.num_streams * options.rounds)
    return tokens / seconds


def _wait_for(line: str, log: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while line not in log.read_text():
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


def _shown(speeds: Sequence[float]) -> str:
    return " and ".join(f"{speed:,.0f}" for speed in sorted(speeds))


def _tell(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32], help="default: 8 32")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=12, help="requests for each stream (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=2, help="of each measurement; the best counts (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=1, help="processes that share the streams (default: %(default)s)")
    parser.add_argument("--keep-alive", action="store_true", help="clients ask again on the connection they have, as SDKs do")
    parser.add_argument("--port", type=int, default=8765)
    return parser


if __name__ == "__main__":
    sys.exit(main())
