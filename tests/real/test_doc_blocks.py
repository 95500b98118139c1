"""Every curl and Python block of the README and the documentation, and the examples, run as they stand against one real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import Block, blocks
from tests.engines import cache_folder
from tests.examples import COMMANDS, EXAMPLES, client_environ
from tests.node import package_folder
from tests.servers import Server, running_server, user_environ

URL = "127.0.0.1:8000"
ADMIN_KEY = "sesame"
PROMPTS = ["The capital of France is", "One, two, three,", "Water boils at"]
ASK_FROM_PYTHON = """
import json, sys, levserve
path, cache, fields, prompts = json.loads(sys.argv[1])
with levserve.open(path, served_model_name="smollm2-135m", max_running=8, prefill_chunk=128, cache_dir=cache) as model:
    texts = [choice.text for result in model.generate(prompts, **fields) for choice in result.choices]
    chat = model.chat([{"role": "user", "content": "Name a river."}], max_tokens=12, seed=3).text
print(json.dumps([texts, chat]))
"""
FAILING_CURL = 'curl() { command curl -sS --fail-with-body "$@" && echo; }\n'


@pytest.fixture(scope="module")
def server(bundled_gguf: Path) -> Iterator[Server]:
    """The bundled model as the documents have it, with fewer rows so that a test run compiles less."""
    flags = (
        "--model",
        str(bundled_gguf),
        "--served-model-name",
        "smollm2-135m",
        "--max-running",
        "8",
        "--prefill-chunk",
        "128",
    )
    with running_server(*flags, "--admin-key", ADMIN_KEY) as server:
        yield server


def run(server: Server, command: list[str], text: str) -> str:
    """A block that opens the model itself gets the server's chunk, and so its compiled programs."""
    environ = user_environ() | {
        "LEVSERVE_ADMIN_KEY": ADMIN_KEY,
        "LEVSERVE_API_KEY": "any",
        "LEVSERVE_CACHE_DIR": str(cache_folder()),
        "LEVSERVE_PREFILL_CHUNK": "128",
    }
    moved = text.replace(URL, server.url.removeprefix("http://"))
    result = subprocess.run([*command, moved], capture_output=True, text=True, timeout=120, env=environ)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "block", [one for one in blocks("sh") if one.text.startswith("curl ")], ids=lambda block: block.place
)
def test_every_curl_command_gets_its_answer(block: Block, server: Server) -> None:
    output = run(server, ["bash", "-e", "-c"], FAILING_CURL + block.text)
    assert output.strip()
    assert not re.search(r'^(data: )?\{"error":', output, re.MULTILINE)
    if '"stream": true' in block.text:
        assert output.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.place)
def test_every_python_program_runs(block: Block, server: Server) -> None:
    assert run(server, [sys.executable, "-c"], block.text).strip()


def test_a_program_gets_the_text_that_the_server_gives(server: Server, bundled_gguf: Path) -> None:
    fields = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 2}
    body = {"model": "smollm2-135m", "prompt": PROMPTS, **fields}
    wanted = [choice["text"] for choice in server.call("/v1/completions", body).body["choices"]]
    question = [{"role": "user", "content": "Name a river."}]
    chat = {"model": "smollm2-135m", "messages": question, "max_tokens": 12, "seed": 3}
    answer = server.call("/v1/chat/completions", chat).body["choices"][0]["message"]["content"]
    given = json.dumps([str(bundled_gguf), str(cache_folder()), fields, PROMPTS])
    done = subprocess.run(
        [sys.executable, "-c", ASK_FROM_PYTHON, given],
        capture_output=True,
        text=True,
        timeout=600,
        env=user_environ(),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [wanted, answer]


@pytest.mark.parametrize("name", [name for name in COMMANDS if not name.endswith(".mjs")])
def test_every_example_runs(name: str, server: Server) -> None:
    command = [*COMMANDS[name], str(EXAMPLES / name)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | client_environ(server.url)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout


@pytest.mark.node
def test_the_example_for_node_runs(server: Server, tmp_path: Path) -> None:
    """From a folder beside the package, as a program of its own project would be."""
    (tmp_path / "node_modules").symlink_to(package_folder() / "node_modules")
    program = shutil.copy(EXAMPLES / "chat_with_node.mjs", tmp_path)
    done = subprocess.run(
        ["node", "--preserve-symlinks", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | client_environ(server.url),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
