"""Every curl and Python block of the README and the docs, and the examples, run against one real server."""

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
RUN_PROGRAMS = """
import json, os, signal, sys
import openai
for line in sys.stdin:
    program, environ, output, errors = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(120)
os.environ.clear()
os.environ.update(environ)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number, path in (1, output), (2, errors):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
"""
"""Runs each program in a process of its own, forked after OpenAI's package is imported: nearly all of them
need it, and importing it takes a second."""
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


@pytest.fixture(scope="module")
def programs() -> Iterator[subprocess.Popen[str]]:
    """Takes programs line by line, and gives their exit codes."""
    command = [sys.executable, "-c", RUN_PROGRAMS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def block_environ() -> dict[str, str]:
    """A block that opens the model itself gets the server's chunk, and so its compiled programs."""
    return user_environ() | {
        "LEVSERVE_ADMIN_KEY": ADMIN_KEY,
        "LEVSERVE_API_KEY": "any",
        "LEVSERVE_CACHE_DIR": str(cache_folder()),
        "LEVSERVE_PREFILL_CHUNK": "128",
    }


def moved(text: str, server: Server) -> str:
    return text.replace(URL, server.url.removeprefix("http://"))


@pytest.mark.parametrize(
    "block", [one for one in blocks("sh") if one.text.startswith("curl ")], ids=lambda block: block.place
)
def test_every_curl_command_gets_its_answer(block: Block, server: Server) -> None:
    command = ["bash", "-e", "-c", FAILING_CURL + moved(block.text, server)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=block_environ())
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    assert output.strip()
    assert not re.search(r'^(data: )?\{"error":', output, re.MULTILINE)
    if '"stream": true' in block.text:
        assert output.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.place)
def test_every_python_program_runs(
    block: Block, server: Server, programs: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert programs.stdin is not None and programs.stdout is not None
    output, errors = tmp_path / "output", tmp_path / "errors"
    given = [moved(block.text, server), block_environ(), str(output), str(errors)]
    print(json.dumps(given), file=programs.stdin, flush=True)
    assert programs.stdout.readline().strip() == "0", output.read_text() + errors.read_text()
    assert output.read_text().strip()


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
    """Runs it in a folder beside the package, like a program of a project of its own."""
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
