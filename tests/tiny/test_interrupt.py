"""Ctrl-C while a command compiles."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.conftest import GOLDEN
from tests.waiting import COMPILE_SECONDS

HEED_INTERRUPTS = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has them ignored
runpy.run_module("levserve", run_name="__main__", alter_sys=True)
"""
COMPILE_FOR_EVER = """
import sys, threading
import jax
from levserve import __main__, cli

def compile_for_ever(has_begun):
    while True:
        jax.jit(lambda number: number + 1).lower(1.0).compile()
        has_begun.set()

def run():
    has_begun = threading.Event()
    for _ in range(4):
        threading.Thread(target=compile_for_ever, args=[has_begun], daemon=True).start()
    has_begun.wait()
    raise KeyboardInterrupt

cli.main = run
sys.exit(__main__.main())
"""


def test_threads_that_compile_do_not_spoil_the_end_of_a_command() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COMPILE_FOR_EVER], capture_output=True, text=True, timeout=COMPILE_SECONDS
    )
    assert (ended.returncode, ended.stderr) == (130, "")


def test_an_interrupt_while_generate_compiles_ends_it_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HEED_INTERRUPTS, "generate", "t5", "--model", str(GOLDEN / "llama")]
    command += ["--cache-dir", str(tmp_path)]  # an empty one, so that there is something to compile
    reader, terminal = pty.openpty()
    environ = os.environ | {"TERM": "xterm"}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    told = b""
    try:
        with suppress(OSError):  # how a terminal that nobody writes to any more ends
            while block := os.read(reader, 65536):
                told += block
                if b"compiling" in block:
                    process.send_signal(signal.SIGINT)
        assert process.wait(COMPILE_SECONDS) == 130
    finally:
        process.kill()
        process.wait()
        os.close(reader)
    assert b"compiling" in told and told.endswith(b"\r\x1b[K")  # the progress goes, and nothing comes after
