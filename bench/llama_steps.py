#!/usr/bin/env python3
"""Measures llama.cpp's engine alone, as bench/decode.py measures levserve's: milliseconds per decode
step by number of rows, and prompt tokens per second.

    python bench/llama_steps.py model.gguf --rows 1 8 --context 256 --prompt 512 --threads 2

It calls llama.cpp's own functions through llama-cpp-python, which must be installed for this Python.
Rows are sequences of one batch, as in llama-server. If llama.cpp is built with a library for each kind
of CPU, `--backends` is the folder of these libraries.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from pathlib import Path

import llama_cpp
import numpy as np


class Engine:
    """A model and a context with room for `rows` sequences."""

    def __init__(self, path: Path, rows: int, context: int, threads: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = rows * context, rows
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._largest = params.n_batch
        self._batch = llama_cpp.llama_batch_init(self._largest, 0, 1)
        self._rng = np.random.default_rng(0)
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def prefill(self, row: int, length: int) -> float:
        """Seconds for a prompt of random tokens; only the last one has logits."""
        started = time.perf_counter()
        for start in range(0, length, self._largest):
            stop = min(start + self._largest, length)
            self._run([(row, at, at == length - 1) for at in range(start, stop)])
        return time.perf_counter() - started

    def step(self, rows: int, position: int) -> float:
        """Seconds for one more token of each row."""
        started = time.perf_counter()
        self._run([(row, position, True) for row in range(rows)])
        return time.perf_counter() - started

    def _run(self, places: list[tuple[int, int, bool]]) -> None:
        """Decodes a random token at each place: a row, a position, and whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(places)
        tokens = self._rng.integers(self._num_tokens, size=len(places)).tolist()
        for at, (row, position, is_wanted) in enumerate(places):
            batch.token[at], batch.pos[at] = tokens[at], position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
            batch.logits[at] = is_wanted
        failed = llama_cpp.llama_decode(self._context, batch)
        if failed:
            raise SystemExit(f"llama_decode failed with {failed}")
        llama_cpp.llama_synchronize(self._context)


def main() -> None:
    options = _parser().parse_args()
    if options.backends:
        library = ctypes.CDLL(str(next(options.backends.glob("libggml.*so"))))
        library.ggml_backend_load_all_from_path(str(options.backends).encode())
    llama_cpp.llama_backend_init()
    print(llama_cpp.llama_print_system_info().decode(), flush=True)
    longest = max(options.context + options.steps, options.prompt) + 1
    engine = Engine(options.file, max(options.rows), longest, options.threads)
    if options.prompt:
        engine.prefill(0, options.prompt)
        seconds = []
        for _ in range(3):
            engine.clear()
            seconds.append(engine.prefill(0, options.prompt))
        rate = options.prompt / statistics.median(seconds)
        print(f"{options.file.name}: prompt of {options.prompt}: {rate:.0f} tokens/s", flush=True)
    for rows in options.rows:
        engine.clear()
        for row in range(rows):
            engine.prefill(row, options.context)
        taken = [engine.step(rows, options.context + at) for at in range(options.steps)]
        step = statistics.median(taken)
        print(
            f"{options.file.name}: {rows} rows, context {options.context}: {1000 * step:.2f} ms a step, "
            f"{rows / step:.1f} tokens/s",
            flush=True,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="0: none")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--backends", type=Path, metavar="FOLDER")
    return parser


if __name__ == "__main__":
    main()
