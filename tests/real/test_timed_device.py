"""bench/host.py: a server answers with a device that only keeps time, as benchmarks of replicas use it."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from fleet_servers import start_servers


def test_a_server_around_a_device_that_keeps_time_answers() -> None:
    flags = ["--max-running", "4", "--round-steps", "8"]
    with start_servers(1, flags, device=(1.0, 10.0)) as (server,):
        body = json.dumps(
            {"model": "timed", "prompt": "Once", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        )
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            usage = json.load(answer)["usage"]
        assert usage["completion_tokens"] == 20
        assert server.metric("host_bench_device_seconds") >= 0.02  # three rounds of eight steps
