"""Measures how much of the engine's speed a batch gets, and how much a batch slows live streams.

    python bench/batch.py                       both, with the bundled model
    python bench/batch.py --only throughput --model Qwen/Qwen3-0.6B
    python bench/batch.py --only live --streams 8

The first part runs the same number of requests in two ways, a slice at a time: as sequences of tokens
that go straight to the engine, and as a file that `levserve batch` reads, checks, tokenizes, detokenizes
and writes. Both ways run once before anything is measured, both may have as many sequences in the engine
as it admits, and they take turns at going first, so that neither gains from programs that were compiled
meanwhile or from a machine that becomes quieter. The result is the median of the slices' ratios, for
elapsed time and for CPU time, which other programs on the machine change less. The second part starts a
server, streams from it by turns with and without a batch at the same time, and prints the ratio of the
99th percentiles of the gaps between tokens. No prompt is sent twice, so no prefix cache helps.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import math
import queue
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from levserve.api.opening import OpenedDevice, open_device
from levserve.batch.ordering import MAX_LINES
from levserve.batch.output import Output
from levserve.batch.source import Source
from levserve.batch.tally import Tally
from levserve.schedule.request import GenerationRequest, Sampling, TokenBatch
from levserve.settings.program import make_settings
from levserve.terminal.batch import run

START_SECONDS = 900.0
LIVE_TOKENS = 64
BATCH_LINES = 20_000
"""More than any phase of the second part gets through."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", choices=("throughput", "live"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--slices", type=int, default=8, help="parts that the two ways take by turns")
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--streams", type=int, default=4, help="live streams at the same time")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase of the second part")
    parser.add_argument("--phases", type=int, default=3, help="with and without a batch, each")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "live":
            measure_throughput(options, rng, Path(folder))
        if options.only != "throughput":
            measure_live(options, rng, Path(folder))


def measure_throughput(options: argparse.Namespace, rng: random.Random, folder: Path) -> None:
    settings = make_settings({"model": options.model})
    opened = open_device(settings, lambda line: None)
    per_slice = options.requests // options.slices
    ratios: list[Ratio] = []
    try:
        options.vocab_size = opened.registry.default.tokenizer.vocab_size
        num_warming = 2 * opened.registry.engine.max_inflight
        for arm in (run_engine, run_batch):
            wait_compiled(opened)
            arm(opened, num_warming, options, rng, folder)
        for number in range(options.slices):
            ratios.append(compare_slice(opened, per_slice, options, rng, folder, number))
    finally:
        opened.registry.engine.begin_drain(0.0)
        opened.close()
    print(
        f"batch / engine on {per_slice * options.slices:,} requests, the median of {options.slices} slices: "
        f"{statistics.median(ratio.speed for ratio in ratios):.3f} (goal: 0.95); "
        f"by processor time {statistics.median(ratio.work for ratio in ratios):.3f}",
        flush=True,
    )


class Ratio(NamedTuple):
    """What the engine alone takes divided by what a batch takes, in seconds and in CPU seconds."""

    speed: float
    work: float


def compare_slice(
    opened: OpenedDevice,
    count: int,
    options: argparse.Namespace,
    rng: random.Random,
    folder: Path,
    number: int,
) -> Ratio:
    """In every other slice the batch goes first."""
    seconds: dict[str, float] = {}
    work: dict[str, float] = {}
    arms = {"engine": run_engine, "batch": run_batch}
    for name in sorted(arms, reverse=number % 2 == 0):
        begun = time.process_time()
        seconds[name] = arms[name](opened, count, options, rng, folder)
        work[name] = time.process_time() - begun
    done = count * options.output_tokens
    ratio = Ratio(seconds["engine"] / seconds["batch"], work["engine"] / work["batch"])
    print(
        f"engine {done / seconds['engine']:8.1f} tok/s, batch {done / seconds['batch']:8.1f} tok/s, "
        f"ratio {ratio.speed:.3f}, by processor time {ratio.work:.3f}, "
        f"{'batch' if number % 2 else 'engine'} first",
        flush=True,
    )
    return ratio


def wait_compiled(opened: OpenedDevice) -> None:
    """Waits until the programs that compile in the background are ready too."""
    metrics = opened.registry.engine.metrics.registry
    before = -1.0
    while True:
        time.sleep(10)
        samples = (sample for family in metrics.collect() for sample in family.samples)
        value = sum(sample.value for sample in samples if sample.name == "levserve_compiles_total")
        if value == before:
            return
        before = value


def run_engine(
    opened: OpenedDevice, count: int, options: argparse.Namespace, rng: random.Random, folder: Path
) -> float:
    """Seconds that the engine needs for `count` sequences, always with as many in flight as it admits."""
    engine, model = opened.registry.engine, opened.registry.default
    sampling = Sampling(temperature=0.0)
    requests = [
        GenerationRequest(
            f"bench:{rng.getrandbits(64):x}",
            tuple(rng.randrange(100, options.vocab_size) for _ in range(options.prompt_tokens)),
            options.output_tokens,
            sampling,
        )
        for _ in range(count)
    ]
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take(index: int, batch: TokenBatch) -> None:
        if batch.finish is not None:
            ends.put(index)

    started = time.monotonic()
    num_running = 0
    for request in requests:
        if num_running == engine.max_inflight:
            ends.get()
            num_running -= 1
        engine.push([request], model, take)
        num_running += 1
    for _ in range(num_running):
        ends.get()
    return time.monotonic() - started


def run_batch(
    opened: OpenedDevice,
    count: int,
    options: argparse.Namespace,
    rng: random.Random,
    folder: Path,
) -> float:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    target.unlink(missing_ok=True)
    write_lines(source, count, opened.registry.default_name, options, rng)
    started = time.monotonic()
    with Output(target) as output:
        requests = Source(source)
        run(requests, output, opened, Tally(requests.num_bytes), MAX_LINES)
        seconds = time.monotonic() - started
        assert output.results.statuses == {200: count}, output.results.statuses
    return seconds


def write_lines(path: Path, count: int, model: str, options: argparse.Namespace, rng: random.Random) -> None:
    with path.open("w") as file:
        for number in range(count):
            prompt = [rng.randrange(100, options.vocab_size) for _ in range(options.prompt_tokens)]
            body = {"model": model, "prompt": prompt, "max_tokens": options.output_tokens}
            body |= {"temperature": 0, "ignore_eos": True}
            line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def measure_live(options: argparse.Namespace, rng: random.Random, folder: Path) -> None:
    command = [sys.executable, "-m", "levserve", "--model", options.model, "--port", "0"]
    command += ["--state-dir", str(folder / "state"), "--log-format", "json"]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(command, stderr=log)
    try:
        url = wait_ready(folder / "log", process)
        model = call(f"{url}/v1/models")["data"][0]["id"]
        options.vocab_size = call(f"{url}/tokenizer_info")["vocab_size"]
        stream_for(url, model, options, rng, 15.0)  # programs compile in the background meanwhile
        time.sleep(30)
        gaps: dict[bool, list[float]] = {False: [], True: []}
        num_lines = 0
        for _ in range(options.phases):
            gaps[False] += stream_for(url, model, options, rng, options.seconds)
            batch = start_batch(url, model, options, rng, folder)
            gaps[True] += stream_for(url, model, options, rng, options.seconds)
            call(f"{url}/v1/batches/{batch}/cancel", {})
            while (shown := call(f"{url}/v1/batches/{batch}"))["status"] != "cancelled":
                time.sleep(0.2)
            num_lines += shown["request_counts"]["completed"]
        report_gaps(gaps, num_lines, options)
    finally:
        process.terminate()
        process.wait()
        log.close()


def report_gaps(gaps: dict[bool, list[float]], num_lines: int, options: argparse.Namespace) -> None:
    for has_batch, name in ((False, "alone"), (True, "beside a batch")):
        found = gaps[has_batch]
        shown = ", ".join(f"p{share} {1000 * percentile(found, share):.1f} ms" for share in (50, 90, 99))
        print(f"{options.streams} live streams {name}: {len(found):,} gaps, {shown}")
    ratio = percentile(gaps[True], 99) / percentile(gaps[False], 99)
    seconds = options.phases * options.seconds
    print(f"the batch answered {num_lines:,} requests in these {seconds:.0f} s")
    print(f"p99 of the gaps beside a batch / alone: {ratio:.3f} (goal: at most 1.2)", flush=True)


def percentile(values: list[float], share: int) -> float:
    ordered = sorted(values)
    return ordered[min(math.ceil(len(ordered) * share / 100), len(ordered)) - 1]


def stream_for(
    url: str, model: str, options: argparse.Namespace, rng: random.Random, seconds: float
) -> list[float]:
    """The gaps between the tokens of live streams, each of which sends one request after another."""
    until = time.monotonic() + seconds
    gaps: list[float] = []
    threads = []
    for _ in range(options.streams):
        seed = rng.getrandbits(64)
        thread = threading.Thread(target=stream_one, args=(url, model, options, seed, until, gaps))
        threads.append(thread)
        thread.start()
    for thread in threads:
        thread.join()
    return gaps


def stream_one(
    url: str, model: str, options: argparse.Namespace, seed: int, until: float, gaps: list[float]
) -> None:
    rng = random.Random(seed)
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
    while time.monotonic() < until:
        prompt = [rng.randrange(100, options.vocab_size) for _ in range(options.prompt_tokens)]
        body = {"model": model, "prompt": prompt, "max_tokens": LIVE_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        last = None
        with connection.getresponse() as response:
            assert response.status == 200, response.read()
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
    connection.close()


def start_batch(url: str, model: str, options: argparse.Namespace, rng: random.Random, folder: Path) -> str:
    path = folder / "batch.jsonl"
    write_lines(path, BATCH_LINES, model, options, rng)
    file_id = upload(url, path)
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = call(f"{url}/v1/batches", body)["id"]
    while call(f"{url}/v1/batches/{batch}")["request_counts"]["completed"] < 1:
        time.sleep(0.2)
    return str(batch)


def upload(url: str, path: Path) -> str:
    boundary = "----bench"
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    form = io.BytesIO()
    form.write(head.encode())
    with path.open("rb") as file:
        shutil.copyfileobj(file, form)
    form.write(f"\r\n--{boundary}--\r\n".encode())
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    request = urllib.request.Request(f"{url}/v1/files", form.getvalue(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return str(json.load(response)["id"])


def wait_ready(log: Path, process: subprocess.Popen[bytes]) -> str:
    """The address of the server, once it is ready."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"the server ended: {log.read_text()[-2000:]}")
        for line in log.read_text().splitlines():
            if "ready: " in line:
                return "http://" + line.partition("http://")[2].split(";")[0].split('"')[0]
        time.sleep(0.5)
    raise SystemExit("the server is not ready")


def call(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=600) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
