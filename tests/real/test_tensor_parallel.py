"""A server whose models are shared by parts of a CPU, as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import FOUR_DEVICES, GOLDEN, QUICK_COMPILE
from tests.servers import running_server

CASE = json.loads((GOLDEN / "llama" / "golden.json").read_text())["cases"][0]
FILE = f"""
[model]
dtype = float32
max-seq-len = 128

[engine]
device = cpu
max-running = 2
prefill-chunk = 8

[model.alone]
model = {GOLDEN / "llama"}

[model.shared]
model = {GOLDEN / "llama"}
tensor-parallel = 2

[model.too-many]
model = {GOLDEN / "llama"}
tensor-parallel = 3
"""


def test_models_on_one_device_and_on_two_are_served_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "levserve.ini"
    path.write_text(FILE)
    asked = {"prompt": CASE["prompt"], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    flags = QUICK_COMPILE["XLA_FLAGS"].replace(FOUR_DEVICES, "")  # the server itself divides the CPU
    with running_server(
        "--config", str(path), "--admin-key", "sesame", is_forked=True, XLA_FLAGS=flags
    ) as server:
        for name in ("alone", "shared"):
            reply = server.call("/v1/completions", {"model": name, **asked})
            assert reply.status == 200, reply.body
            assert reply.body["choices"][0]["token_ids"] == CASE["greedy"][:8]
        # Constrained to two tokens, with two choices, after a reload over HTTP: all of it on two devices.
        assert server.call("/admin/reload", {"name": "shared"}, key="sesame").status == 200
        held = {"model": "shared", **asked, "n": 2, "allowed_token_ids": [7, 14]}
        reply = server.call("/v1/completions", held)
        assert reply.status == 200, reply.body
        for choice in reply.body["choices"]:
            assert set(choice["token_ids"]) <= {7, 14} and len(choice["token_ids"]) == 8
        reply = server.call("/v1/completions", {"model": "shared", **asked})
        assert reply.body["choices"][0]["token_ids"] == CASE["greedy"][:8]
        reply = server.call("/v1/completions", {"model": "too-many", **asked})
        assert reply.status == 503
        assert "--tensor-parallel 3" in reply.body["error"]["message"]
        assert "4 query heads cannot be shared evenly by 3 devices" in reply.body["error"]["message"]
    assert any("on each of 2 devices" in line for line in server.lines)
