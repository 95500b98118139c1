"""Scores one long prompt and shows what it costs: seconds, and how far the server's memory rises above its
usual peak.

    python bench/score.py --url http://127.0.0.1:8000 --tokens 4000

The server must run on this machine: its memory is read from /proc. A first, short request sets the usual
peak.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--tokens", type=int, default=4000)
    options = parser.parse_args()
    model = call(options.url + "/v1/models")["data"][0]["id"]
    pid = find_worker(options.url)
    before = score(options.url, model, pid, 200)
    after = score(options.url, model, pid, options.tokens)
    print(
        f"peak memory rose by {(after - before) / 1e6:.0f} MB over the usual peak; a table of length x vocabulary would take",
        end=" ",
    )
    print(f"{options.tokens * call(options.url + '/tokenizer_info')['vocab_size'] * 4 / 1e6:.0f} MB")


def score(url: str, model: str, pid: int, num_tokens: int) -> int:
    """Scores a prompt of so many tokens, and returns the server's peak memory in bytes."""
    prompt = [100 + (number * 7919) % 30_000 for number in range(num_tokens)]
    start = time.monotonic()
    body = {"model": model, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = call(url + "/v1/completions", body)
    seconds = time.monotonic() - start
    scores = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert len(scores) == num_tokens and scores[0] is None and all(value <= 0 for value in scores[1:])
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    rate = num_tokens / seconds
    print(
        f"{num_tokens:6d} tokens scored in {seconds:6.1f} s ({rate:.0f} tok/s); peak memory {peak / 1e6:.0f} MB",
        flush=True,
    )
    return peak


def find_worker(url: str) -> int:
    """The process that holds the model: the largest one whose command line says levserve."""
    sizes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"levserve" in (folder / "cmdline").read_bytes():
                sizes[int(folder.name)] = int((folder / "statm").read_text().split()[1])
        except OSError:
            continue
    if not sizes:
        raise SystemExit(f"no levserve process on this machine; is {url} somewhere else?")
    return max(sizes, key=lambda pid: sizes[pid])


def call(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=600
    ) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
