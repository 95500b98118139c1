"""A bucket of models behind a whole server: a Levanter run and a model in two .gguf files are served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GOLDEN, QUICK_COMPILE
from tests.servers import Server, running_server
from tests.stores import google_store, upload
from tests.tiny.test_gguf import metadata_of, tensors_of, write_gguf
from tests.tiny.test_unloading import FLAGS

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
USER_DEFINED = 4  # one token wherever its text stands, so that the golden prompts can be typed


def chat_gguf(folder: Path) -> list[Path]:
    """The golden llama as files that contain its vocabulary and its chat template."""
    metadata = metadata_of("llama")
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    vocabulary: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [USER_DEFINED] * len(tokens),
        "tokenizer.chat_template": TEMPLATE,
    }
    write_gguf(folder / "small.gguf", metadata | vocabulary, tensors_of("llama"), max_tensors=16)
    return sorted(folder.iterdir())


def golden_case(family: str) -> dict[str, Any]:
    case: dict[str, Any] = json.loads((GOLDEN / family / "golden.json").read_text())["cases"][2]
    return case


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with google_store() as files:
        for part in chat_gguf(tmp_path_factory.mktemp("gguf")):
            files.pipe_file(f"models/mixed/{part.name}", part.read_bytes())
        run = "models/mixed/run/step-7"
        upload(files, GOLDEN / "levanter-llama", run)
        config = json.loads((GOLDEN / "levanter-llama" / "tokenizer" / "tokenizer_config.json").read_text())
        config["chat_template"] = TEMPLATE
        files.pipe_file(f"{run}/tokenizer/tokenizer_config.json", json.dumps(config).encode())
        # Compiled with the flags of this process, so programs of earlier tests are found.
        with running_server(
            "--models-dir", "gs://models/mixed", *FLAGS, is_forked=True, **QUICK_COMPILE
        ) as server:
            yield server


def chat(server: Server, model: str, case: dict[str, Any]) -> list[int]:
    """The tokens of the answer to a golden prompt."""
    text = " ".join(f"t{token}" for token in case["prompt"])
    if model == "small":
        text = text.replace(" ", "")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": len(case["greedy"]),
        "temperature": 0,
        "ignore_eos": True,
    }
    reply = server.call("/v1/chat/completions", body)
    assert reply.status == 200, "\n".join([str(reply.body), *server.lines])
    answer = str(reply.body["choices"][0]["message"]["content"])
    return [int(word) for word in answer.replace("t", " ").split()]


def test_a_run_and_a_gguf_file_of_a_bucket_are_listed_and_chatted_with(server: Server) -> None:
    listed = {one["id"]: one["status"] for one in server.call("/v1/models").body["data"]}
    assert listed == {"run": "loaded", "small": "loadable"}
    case = golden_case("levanter-llama")
    assert chat(server, "run", case) == case["greedy"]
    case = golden_case("llama")
    assert chat(server, "small", case) == case["greedy"]
    assert server.metric("models_loaded") == 2
