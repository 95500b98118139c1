"""Host 0 of several hosts that serve one model: what it agrees on with the others, and what it tells them.

Made on the device thread, before jax is touched. Losing a follower ends this process, because its part of
the weights and of the KV cache is gone; the exit code makes systemd or Kubernetes start all hosts again.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from levserve.engine.engine import Engine
from levserve.errors import FAULT_EXIT_CODE, StartupError
from levserve.hosts.frame import FrameKind
from levserve.hosts.identity import identity_of
from levserve.hosts.leader import Leader
from levserve.observe.logs import report_startup_error
from levserve.settings.hosts import split_address
from levserve.settings.settings import Settings
from levserve.weights.fingerprint import fingerprint
from levserve.weights.model_files import ModelFiles

if TYPE_CHECKING:
    from levserve.device.executor import Executor

log = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 2.0
"""How long the device thread has to see the failure too, and HTTP threads to tell their clients."""
HOST_0 = 0
DROP, SWAP_IN = 0, 1
"""What happens to the weights that the hosts have read for a reload."""
WEIGHT_SETTINGS = ("model", "checkpoint_path", "revision")


class Group:
    """Belongs to the device thread, except where a method says otherwise."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._voting = threading.Lock()
        self._votes: defaultdict[int, set[int]] = defaultdict(set)
        self._executor: Executor | None = None
        self._ending = threading.Lock()
        """Held by the thread that ends this process because the group cannot start; never released."""
        self._leader = Leader(
            split_address(settings.coordinator),
            identity_of(settings),
            settings.num_hosts,
            on_lost=self._lose,
            on_failed=self._end_start,
            on_leaving=lambda: os.kill(os.getpid(), signal.SIGTERM),  # which drains this server
            on_ready=self._vote,
        )
        engine.on_close(self._leader.stop)

    def gather(self, report: Callable[[str], None]) -> None:
        """Waits for the other hosts; raises `StartupError` if they do not come."""
        self._leader.gather(self._settings.hosts_timeout, report)

    def agree_on_model(self, files: ModelFiles) -> None:
        """Raises `StartupError`, on all hosts, if another one has other files."""
        own = fingerprint(files)
        for host_id, answer in self._leader.ask(FrameKind.MODEL).items():
            theirs = answer.decode()
            if theirs != own:
                error = StartupError(
                    f"host {host_id} has another model than host 0: "
                    f"the files of {files.name} have the fingerprint {own} on host 0 and {theirs} there"
                )
                self._leader.refuse(error)
                raise error
        self._leader.send(FrameKind.MODEL)

    def agree_on_memory(self, free_bytes: int) -> int:
        """The least that a device of any host has free: all hosts plan for that."""
        others = self._leader.ask(FrameKind.MEMORY)
        least = min(free_bytes, *(int(answer) for answer in others.values()))
        self._leader.send(FrameKind.MEMORY, payload=[memoryview(str(least).encode())])
        return least

    def lead(self, executor: Executor) -> None:
        """Waits until all hosts have the first programs; from here on they repeat what this one runs."""
        self._leader.ask(FrameKind.COMPILED)
        executor.announce = lambda number, arrays: self._leader.send(FrameKind.RUN, number, arrays)
        executor.announce_swap = lambda: self._leader.send(FrameKind.SWAP, SWAP_IN)
        with self._voting:
            self._executor = executor
        programs = executor.programs
        programs.on_compiled = lambda shape: self._vote(HOST_0, programs.numbers[shape])

    def begin_read(self, settings: Settings) -> None:
        """Has the other hosts read the weights that these settings name; a reload's thread calls this."""
        names = {name: getattr(settings, name) for name in WEIGHT_SETTINGS}
        self._leader.send(FrameKind.READ, payload=[memoryview(json.dumps(names).encode())])

    def end_read(self, files: ModelFiles | None) -> None:
        """Waits until the other hosts have read; raises `StartupError` if one failed or has other files.

        In that case they drop what they read, as they do without `files`: this host could not read its own.
        """
        own = None if files is None else fingerprint(files)
        for host_id, answer in self._leader.ask(FrameKind.READ).items():
            read = json.loads(answer)
            if own is not None and read != {"fingerprint": own}:
                self._leader.send(FrameKind.SWAP, DROP)
                raise StartupError(f"host {host_id} {read.get('error') or 'found other files than host 0'}")
        if own is None:
            self._leader.send(FrameKind.SWAP, DROP)

    def give_up(self, error: StartupError) -> None:
        """Tells the other hosts why the group cannot start; the caller then ends this process.

        Blocks if this process is ending already, because another host cannot start.
        """
        self._ending.acquire()
        self._leader.refuse(error)

    def _vote(self, host_id: int, number: int) -> None:
        """Counts the hosts that have compiled a program; any thread may call this."""
        with self._voting:
            self._votes[number].add(host_id)
            is_everywhere = len(self._votes[number]) == self._settings.num_hosts
        if is_everywhere and self._executor is not None:
            self._executor.programs.open_number(number)

    def _end_start(self, error: StartupError) -> None:
        """Ends all hosts because another one cannot start; the device thread may be too busy to do this."""
        self._ending.acquire()
        self._leader.refuse(error)
        report_startup_error(error)
        logging.shutdown()
        os._exit(error.exit_code)

    def _lose(self, reason: str) -> None:
        log.critical("%s, which ends the group", reason)
        self._engine.fail()
        time.sleep(LAST_WORDS_SECONDS)
        logging.shutdown()
        os._exit(FAULT_EXIT_CODE)
