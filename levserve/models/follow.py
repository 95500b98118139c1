"""A follower: of several hosts that serve one model, any but host 0; it repeats what host 0 runs.

It loads its own part of the weights and compiles the same programs, but it has no scheduler and no tokenizer.
Its HTTP port answers health checks and metrics and refuses everything else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from levserve.engine.engine import IDLE_BEAT_SECONDS, Engine
from levserve.errors import FAULT_EXIT_CODE, StartupError
from levserve.hosts.follower import Follower
from levserve.hosts.frame import FrameKind
from levserve.hosts.identity import identity_of
from levserve.hosts.peer import PeerLost
from levserve.models.group import SWAP_IN
from levserve.settings.hosts import split_address
from levserve.settings.settings import Settings
from levserve.weights.fingerprint import fingerprint
from levserve.weights.source import find_source

if TYPE_CHECKING:
    from levserve.device.executor import Executor
    from levserve.models.weight_reader import WeightReader

log = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
"""How long after its drain's deadline host 0 may still take to end the group."""


ENDING = threading.Lock()
"""Both the device thread and the one that receives notice that host 0 is lost."""


def follow(settings: Settings, engine: Engine, *, report: Callable[[str], None]) -> None:
    """Runs on the device thread until the process ends, because host 0 ends it or is lost."""
    report(f"looking for host 0 at {settings.coordinator}")
    follower = Follower(
        split_address(settings.coordinator),
        timeout_seconds=settings.hosts_timeout,
        on_lost=lambda reason: _end(FAULT_EXIT_CODE, f"{reason}, which ends the group"),
        on_stop=lambda: _end(0, ""),
    )
    _leave_together(follower, engine)
    report("waiting until all hosts are there")
    try:
        follower.join(identity_of(settings))
        _follow(follower, settings, engine, report=report)
    except StartupError as error:
        follower.fail(error.exit_code, str(error))
        raise
    except PeerLost as error:
        if not follower.is_leaving:  # otherwise the main thread ends this process in an orderly way
            _end(FAULT_EXIT_CODE, f"{error}, which ends the group")


def _follow(follower: Follower, settings: Settings, engine: Engine, *, report: Callable[[str], None]) -> None:
    files = find_source(settings, report, with_tokenizer=False)
    follower.send_text(FrameKind.MODEL, fingerprint(files))
    follower.expect(FrameKind.MODEL)

    # These import jax, which takes seconds to import and must not be touched before gunicorn forks.
    from levserve.device.executor import Executor
    from levserve.device.memory_error import explained
    from levserve.device.platform import free_bytes
    from levserve.device.programs import Shape
    from levserve.device.sizing import human
    from levserve.model.placement import device_bytes
    from levserve.models.choose import describe
    from levserve.models.read import FEWER_BYTES
    from levserve.models.size import size
    from levserve.models.weight_reader import WeightReader

    description = describe(settings, files)
    for line in description.lines():
        log.info("%s", line)

    def free() -> int:
        return free_bytes(*description.devices)

    with explained(f"{human(description.expected_weight_bytes)} for the weights", FEWER_BYTES, free):
        arrays = description.load_arrays(report)
    weight_bytes = sum(map(device_bytes, arrays.values()))
    sizes = size(description, weight_bytes, agree=partial(_agree, follower))
    asked, advice = description.explain_memory(sizes)
    with explained(asked, advice, free):
        runner = description.make_runner(arrays, sizes, engine.metrics)
        assert isinstance(runner, Executor)
        runner.compile_first(report)
    programs = runner.programs

    def tell_compiled(shape: Shape) -> None:
        programs.open(shape)
        follower.send(FrameKind.READY, programs.numbers[shape])

    programs.on_compiled = tell_compiled
    follower.send(FrameKind.COMPILED)
    programs.start_background()
    engine.progress = f"following host 0 at {settings.coordinator}"
    engine.mark_following()
    log.info("host %d is following host 0", settings.host_id)
    _repeat(follower, engine, runner, WeightReader(follower, description))


def _repeat(follower: Follower, engine: Engine, runner: Executor, reader: WeightReader) -> None:
    """Does what host 0 says, in the same order, until the process ends."""
    import jax

    last = None
    while True:
        frame = follower.take(IDLE_BEAT_SECONDS)
        engine.beat(is_busy=frame is not None)
        if frame is None:
            continue
        match frame.kind:
            case FrameKind.RUN:
                outputs = runner.repeat(frame.number, frame.payload)
                # One run may be in flight behind the last, as on host 0; a run that failed raises here.
                jax.block_until_ready(last)
                last = outputs
            case FrameKind.READ:
                reader.begin(frame.payload)
            case FrameKind.SWAP:
                leaves = reader.take()
                if frame.number == SWAP_IN:
                    runner.swap(leaves)
            case other:
                raise AssertionError(f"host 0 sent {other!r}")


def _agree(follower: Follower, free_bytes: int) -> int:
    follower.send_text(FrameKind.MEMORY, str(free_bytes))
    return int(follower.expect(FrameKind.MEMORY).payload)


def _leave_together(follower: Follower, engine: Engine) -> None:
    """Makes a SIGTERM to this host drain host 0, which then ends the group; this host stays until then."""
    deadlines: list[float] = []

    def tell() -> None:
        if deadlines:
            return
        deadlines.append(0.0)
        is_orderly = engine.drain_deadline > time.monotonic()
        with suppress(PeerLost):
            follower.leave(is_orderly=is_orderly)
        if is_orderly and follower.is_welcome:
            deadlines.append(engine.drain_deadline + LEAVE_SECONDS)

    def wait() -> None:
        time.sleep(max(deadlines[-1] - time.monotonic(), 0.0))  # host 0 ends the process earlier

    engine.on_drain(tell)
    engine.on_close(wait)


def _end(exit_code: int, reason: str) -> None:
    """Ends the process, on the first thread that calls it; any others wait for that."""
    ENDING.acquire()
    if reason:
        log.critical("%s", reason)
    else:
        log.info("host 0 has ended the group")
    logging.shutdown()
    os._exit(exit_code)
