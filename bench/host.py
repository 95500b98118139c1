#!/usr/bin/env python3
"""Measures the server without a device: how much of a device's speed arrives over HTTP, and what a token
costs the host.

    python bench/host.py --streams 64 --step-ms 1.55
    python bench/host.py --streams 256 --step-ms 2.94 --clients 8

The server is the real one, down to the packing of rounds, around a simulated device that only keeps time: its
rounds take the given times, and their tokens are random. Whenever that device is idle, Python was late, so a
machine without an accelerator can measure the host. The clients are processes of bench/load.py, which check
every answer; give them cores of their own, or they will be the bottleneck.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import Gauge

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from levserve import cli
from levserve.models.registry import Registry
from levserve.settings.settings import Settings

STEP_MS, PREFILL_US = "HOST_BENCH_STEP_MS", "HOST_BENCH_PREFILL_US"
LEAST_PREFILL_SECONDS = 0.002
BUSY, PYTHON = "host_bench_device_seconds", "host_bench_device_thread_seconds"
ROUNDS = 'levserve_rounds_total{kind="decode"}'


class Clock:
    """The clock of the simulated device: work starts when everything before it has ended."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self.busy = 0.0

    def run(self, seconds: float) -> float:
        """The time when work of this duration ends if it is dispatched now."""
        self._free_at = max(self._free_at, time.perf_counter()) + seconds
        self.busy += seconds
        return self._free_at


class Later:
    """A result that exists from a certain time on; an earlier read waits without the GIL, as for a device."""

    def __init__(self, values: np.ndarray[Any, Any], at: float) -> None:
        self._values = values
        self._at = at

    def copy_to_host_async(self) -> None: ...

    def block_until_ready(self) -> None:
        time.sleep(max(self._at - time.perf_counter(), 0))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        self.block_until_ready()
        return self._values


def start_timed_device(settings: Settings, registry: Registry) -> threading.Thread:
    thread = threading.Thread(
        target=run_timed_device, args=(settings, registry), name="levserve-device", daemon=True
    )
    thread.start()
    return thread


def run_timed_device(settings: Settings, registry: Registry) -> None:
    """Does what `models.load` and `serve` do, with programs that compute nothing."""
    from levserve.device.executor import Executor
    from levserve.device.loop import DeviceLoop
    from levserve.device.packing import COUNT, SlotTable
    from levserve.device.programs import Programs, Shape
    from levserve.device.rounds import ChunkOutput
    from levserve.device.runner import Runner
    from levserve.device.sampling import NUM_OUTPUTS
    from levserve.device.sizing import Sizes
    from levserve.device.tasks import Attach
    from levserve.engine.served_model import ServedModel
    from levserve.model.rules import Mode
    from levserve.models.entry import Resident
    from levserve.schedule.budget import Budget
    from levserve.schedule.pace import Pace
    from levserve.schedule.pages import PagePool
    from levserve.schedule.scheduler import Scheduler
    from levserve.text.grammar import Grammars
    from levserve.text.tokenizer import load_tokenizer
    from levserve.text.tools.model_tools import ModelTools
    from levserve.weights.source import find_source

    rows = settings.max_running
    sizes = Sizes(
        rows=rows,
        max_seq_len=4096,
        page_size=32,
        num_pages=rows * 128,
        page_bytes=1,
        weight_bytes=1,
        row_sizes=(rows,),
        chunk_sizes=(4096,),
        round_steps=settings.round_steps or 8,
        prefill_row_tokens=64,
    )
    clock = Clock()
    rng = np.random.default_rng(0)
    step_seconds, token_seconds = float(os.environ[STEP_MS]) / 1e3, float(os.environ[PREFILL_US]) / 1e6

    class TimedPrograms(Programs):
        def __init__(self) -> None:
            self._ready = {shape: self._program(shape) for shape in (Shape(4096), Shape(rows, Mode.GREEDY))}
            self._sizes = sizes

        has_cold, is_complete = False, True

        def stop(self, *, waits: bool = True) -> None: ...

        def next_cold(self) -> None: ...

        def _program(self, shape: Shape) -> Any:
            def prefill(leaves: Any, state: Any, packed: Any) -> Any:
                at = clock.run(max(token_seconds * int(packed[:, COUNT].sum()), LEAST_PREFILL_SECONDS))
                drawn = rng.integers(300, 40000, (len(packed), NUM_OUTPUTS[Mode.FULL]), np.int32)
                return state, ChunkOutput(Later(drawn, at), Later(drawn, at), Later(drawn, at))  # type: ignore[arg-type]

            def decode(leaves: Any, state: Any, packed: Any) -> Any:
                at = clock.run(step_seconds * sizes.round_steps)
                return state, Later(rng.integers(300, 40000, (sizes.round_steps, rows, 1), np.int32), at)

            return prefill if shape.is_prefill else decode

    class TimedRunner(Runner):
        def __init__(self) -> None:
            Executor.__init__(self, (), (), TimedPrograms())  # type: ignore[arg-type]
            self._sizes = sizes
            self._slots = SlotTable(rows, sizes.table_width)
            self.prefill_token_seconds = token_seconds

    tokenizer = load_tokenizer(find_source(settings, lambda _: None).path)
    budget = Budget(
        rows, sizes.round_steps, sizes.chunk_costs, busy_tokens=sizes.num_tokens, idle_tokens=4096
    )
    scheduler = Scheduler(PagePool(sizes.num_pages, 32), budget)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, registry.engine.metrics.note_grammar)
    model = ServedModel(
        "timed",
        tokenizer,
        sizes.max_seq_len,
        1,
        int(time.time()),
        grammars,
        ModelTools(tokenizer),
        max_inflight_tokens=10**9,
    )
    pace = Pace(token_seconds, settings.inter_token_goal_ms / 1000)
    engine = registry.engine
    loop = DeviceLoop(engine)
    loop.attach(Attach(model.name, scheduler, TimedRunner(), pace))
    cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
    Gauge(BUSY, "Seconds of work that the device was given.", registry=engine.metrics.registry).set_function(
        lambda: clock.busy
    )
    python = Gauge(PYTHON, "CPU seconds of the device thread.", registry=engine.metrics.registry)
    python.set_function(lambda: time.clock_gettime(cpu_clock))
    registry.publish(Resident(model=model))
    loop.run()


def main() -> int:
    options = _parser().parse_args()
    environ = os.environ | {STEP_MS: str(options.step_ms), PREFILL_US: str(options.prefill_us)}
    flags = [
        "--port",
        options.port,
        "--max-running",
        options.streams,
        "--round-steps",
        options.steps,
        "--log-level",
        "warning",
    ]
    server = subprocess.Popen([sys.executable, __file__, "serve", *map(str, flags)], env=environ)
    url = f"http://127.0.0.1:{options.port}"
    try:
        # Waits until it is ready, and warms it up.
        run_clients(url, options, options.streams, options.streams)
        before, cpu, start = _read_metrics(url), _cpu_seconds(server.pid), time.perf_counter()
        tokens, _ = run_clients(url, options, options.streams, options.requests)
        wall = time.perf_counter() - start
        after, cpu = _read_metrics(url), _cpu_seconds(server.pid) - cpu
        busy, python, rounds = (after[name] - before[name] for name in (BUSY, PYTHON, ROUNDS))
    finally:
        server.terminate()
        server.wait()
    print(
        f"{options.streams} streams, {options.step_ms:g} ms a step, {options.steps} steps a round: {tokens / wall:.0f} tok/s, "
        f"device busy {busy / wall:.0%} of the time; CPU: {cpu / tokens * 1e6:.1f} us a token, {cpu / wall:.2f} cores, "
        f"of which the device thread {python / rounds * 1e3:.2f} ms a round"
    )
    return 0


def run_clients(
    url: str, options: argparse.Namespace, num_streams: int, num_requests: int, *more: str
) -> tuple[int, float]:
    """Tokens that all clients got and the seconds it took; exits if an answer was wrong."""
    load = {
        "--url": url,
        "--concurrency": num_streams // options.clients,
        "--requests": num_requests // options.clients,
        "--json": "-",
        "--prompt-tokens": options.prompt_tokens,
        "--output-tokens": options.output_tokens,
        "--wait-ready": 60,
    }
    command = [
        sys.executable,
        str(ROOT / "bench" / "load.py"),
        *(str(word) for pair in load.items() for word in pair),
        *more,
    ]
    clients = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(options.clients)
    ]
    told = [client.communicate() for client in clients]
    for client, (_, errors) in zip(clients, told):
        if client.returncode:
            raise SystemExit(errors)
    summaries = [json.loads(result)["summary"] for result, _ in told]
    return sum(summary["output_tokens"] for summary in summaries), max(
        summary["wall_seconds"] for summary in summaries
    )


def _read_metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url + "/metrics") as response:
        lines = response.read().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def _cpu_seconds(arbiter: int) -> float:
    """CPU seconds of gunicorn's arbiter and its worker."""
    pids = (str(arbiter), *Path(f"/proc/{arbiter}/task/{arbiter}/children").read_text().split())
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument(
        "--step-ms",
        type=float,
        default=1.55,
        help="what a decode step of all streams takes (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill-us", type=float, default=4.0, help="what a token of prefill takes (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=8, help="decode steps in a round (default: %(default)s)")
    parser.add_argument(
        "--clients", type=int, default=1, help="processes that share the streams (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8765)
    return parser


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        cli._start_device = start_timed_device
        sys.exit(cli.main(sys.argv[2:]))
    sys.exit(main())
