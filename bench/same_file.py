#!/usr/bin/env python3
"""Compares levserve and llama.cpp on the same GGUF files, the engines alone, one after another.

    python bench/random_gguf.py --shape llama-8b --kind q4_0 --bare 8b.gguf
    python bench/same_file.py 8b.gguf --cores 2 16 --rows 1 8 --llama-python path/to/a/python/with/llama-cpp-python
    python bench/same_file.py 8b.gguf --quantize auto int8-blocks --context 64 --prompt 0

`file_steps.py` measures levserve, with each choice of `--quantize`, and `llama_steps.py` measures
llama.cpp. Both run on the same cores, the first ones that this process may use. A ratio is how many
times as fast levserve is. bench/compare.py measures whole servers over HTTP.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
LLAMA = "llama.cpp"
RESULT = re.compile(
    r"(?P<rows>\d+) rows, context .*?: (?P<step>[\d.]+) ms|prompt of \d+: (?P<prompt>\d+) tok"
)


def main() -> None:
    options = _parser().parse_args()
    cores = sorted(os.sched_getaffinity(0))
    for file in options.file:
        for count in options.cores:
            results = {}
            for engine in (*options.quantize, LLAMA):
                print(f"== {file.name}, {count} cores: {engine}", flush=True)
                results[engine] = measure(engine, file, cores[:count], options)
            print_ratios(f"{file.name}, {count} cores", results)


def measure(engine: str, file: Path, cores: list[int], options: argparse.Namespace) -> dict[str, float]:
    """The results of the engine's own program: milliseconds of a step by rows, and tokens/s of a prompt."""
    same = [str(file), "--rows", *map(str, options.rows)]
    for name in ("context", "prompt", "steps"):
        same += [f"--{name}", str(getattr(options, name))]
    if engine == LLAMA:
        command = [options.llama_python, str(HERE / "llama_steps.py"), *same, "--threads", str(len(cores))]
        command += ["--backends", str(options.backends)] if options.backends else []
    else:
        command = [sys.executable, str(HERE / "file_steps.py"), *same, "--quantize", engine]
        command += ["--cache-dir", options.cache_dir] if options.cache_dir else []
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            capture_output=True,
            text=True,
            timeout=options.seconds,
        )
    except subprocess.TimeoutExpired:
        print(f"not ready after {options.seconds} s", flush=True)
        return {}
    print(done.stdout.strip(), f"({time.monotonic() - begun:.0f} s in all)", flush=True)
    if done.returncode:
        print(f"failed with {done.returncode}: {done.stderr[-800:]}", flush=True)
    found = {}
    for match in RESULT.finditer(done.stdout):
        rows, step, prompt = match["rows"], match["step"], match["prompt"]
        found["prompt" if prompt else f"{rows} rows"] = float(prompt or step)
    return found


def print_ratios(title: str, results: dict[str, dict[str, float]]) -> None:
    theirs = results.pop(LLAMA)
    for engine, ours in results.items():
        for what in theirs.keys() & ours.keys():
            ratio = ours[what] / theirs[what] if what == "prompt" else theirs[what] / ours[what]
            unit = "tok/s" if what == "prompt" else "ms"
            print(
                f"RATIO {title}, {engine}, {what}: {ours[what]:.2f} {unit}, {LLAMA} {theirs[what]:.2f}: "
                f"x {ratio:.2f}",
                flush=True,
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--cores", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128, help="0: none")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--quantize", nargs="+", default=["auto"], help="as levserve takes it (default: auto)"
    )
    parser.add_argument("--llama-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--backends", type=Path, metavar="FOLDER", help="as llama_steps.py takes it")
    parser.add_argument("--cache-dir", metavar="FOLDER", help="as levserve takes it")
    parser.add_argument("--seconds", type=float, default=600, help="at most, for one measurement")
    return parser


if __name__ == "__main__":
    main()
