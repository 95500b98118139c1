#!/usr/bin/env python3
"""Measures how long the first and later starts of a model take, and how much memory the server then has.

    python bench/random_gguf.py --shape smollm2-1.7b --kind q4_0 model.gguf
    python bench/start.py --model model.gguf
    python bench/start.py --model model.gguf -- --quantize int8-blocks

Starts levserve with an empty cache folder, then without prepared weights (`--weight-cache 0`) but with the programs
that the first start compiled, then with both, and then two servers at once. What follows `--` goes to every server.
The floor is reading the model's file once from memory, where the earlier starts have brought it.

Columns: seconds until /readyz; CPU seconds until then; memory of all of the server's processes, then its
anonymous part and its pages of files; its proportional share, where servers share pages; tokens per
second of one stream. Sizes are in MB, 10^6 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
READY_SECONDS = 1800
STOP_SECONDS = 30
POLL_SECONDS = 0.05
NAME = "measured"
BLOCK_BYTES = 4 << 20
HEADER = f"{'start':28}{'ready s':>9}{'cpu s':>8}{'all MB':>9}{'anon':>8}{'files':>8}{'share':>8}{'tok/s':>8}"


@dataclass
class Server:
    """One levserve, in a process group of its own."""

    flags: Sequence[str]
    log: Path
    port: int = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)
    begun: float = field(init=False)

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "levserve",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *self.flags,
        ]
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        self.begun = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self) -> float:
        """Seconds since the start."""
        while time.monotonic() < self.begun + READY_SECONDS and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(self._url("/readyz"), timeout=5):
                return time.monotonic() - self.begun
            time.sleep(POLL_SECONDS)
        raise SystemExit(f"the server is not ready:\n{self.log.read_text(errors='replace')[-2000:]}")

    def tokens_per_second(self, num_tokens: int) -> float:
        """Of one stream; the first answer warms up."""
        for _ in range(2):
            begun = time.monotonic()
            body = {
                "model": NAME,
                "prompt": "Once",
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self._url("/v1/completions"), json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=READY_SECONDS) as answer:
                num_tokens = json.load(answer)["usage"]["completion_tokens"]
        return num_tokens / (time.monotonic() - begun)

    def processor_seconds(self) -> float:
        ticks = 0
        for process in self._processes():
            ticks += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory(self) -> dict[str, float]:
        """Megabytes of all its processes, by the names in /proc."""
        sizes = {"Rss": 0.0, "Anonymous": 0.0, "Pss": 0.0}
        for process in self._processes():
            for line in (process / "smaps_rollup").read_text().splitlines()[1:]:
                name, _, rest = line.partition(":")
                if name in sizes:
                    sizes[name] += int(rest.split()[0]) * 1024 / 1e6
        return sizes

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _processes(self) -> Iterator[Path]:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                group = int((process / "stat").read_text().rpartition(")")[2].split()[2])
                if group == self.process.pid:
                    yield process

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


def main() -> None:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="levserve-start-", dir=options.folder) as name:
        folder = Path(name)
        flags = ["--model", options.model, "--served-model-name", NAME, "--cache-dir", str(folder / "cache")]
        flags += options.flags
        print(HEADER)
        measure("first", [flags], folder, options.tokens)
        measure("programs kept, weights not", [[*flags, "--weight-cache", "0"]], folder, options.tokens)
        measure("both kept", [flags], folder, options.tokens)
        measure("both kept, two servers", [flags, flags], folder, 0)
        if Path(options.model).is_file():
            print_reading("the model's file", Path(options.model))
        for file in (folder / "cache" / "weights").glob("*/weights"):
            print_reading("the prepared weights", file)


def measure(title: str, commands: Sequence[Sequence[str]], folder: Path, num_tokens: int) -> None:
    """Starts one server after another and prints a line for each when all are ready."""
    servers = [Server(flags, folder / f"log-{number}") for number, flags in enumerate(commands)]
    try:
        rows = []
        for server in servers:
            server.start()
            rows.append((server.wait_ready(), server.processor_seconds()))
        for server, (ready, processor) in zip(servers, rows):
            memory = server.memory()
            in_files = memory["Rss"] - memory["Anonymous"]
            sizes = f"{memory['Rss']:9.0f}{memory['Anonymous']:8.0f}{in_files:8.0f}{memory['Pss']:8.0f}"
            speed = f"{server.tokens_per_second(num_tokens):8.2f}" if num_tokens else ""
            print(f"{title:28}{ready:9.2f}{processor:8.2f}{sizes}{speed}", flush=True)
    finally:
        for server in servers:
            if hasattr(server, "process"):
                server.stop()


def print_reading(title: str, path: Path) -> None:
    block = bytearray(BLOCK_BYTES)
    begun = time.monotonic()
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass
    seconds = time.monotonic() - begun
    print(f"{f'reading {title} once':37}{seconds:8.2f} s for {path.stat().st_size / 1e6:,.0f} MB")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="as levserve takes it")
    parser.add_argument(
        "--folder", help="where the cache folder of the measurement is made; by default the system's"
    )
    parser.add_argument("--tokens", type=int, default=64, help="length of the timed answers; 0: none")
    parser.add_argument("flags", nargs="*", help="what every server is given as well, after --")
    return parser


if __name__ == "__main__":
    main()
