"""The start of a model in six steps, each in a file of its own: find, describe, read, size, build, probe.

Each step takes records of the steps before it and returns one: `ModelFiles`, `Description`, `Contents`,
`Sizes`, `Loaded` and `ProbeScores`. A dry run takes the same steps. `load` runs on the device thread for the
first model, and on the loader's thread for others.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from levserve.device.memory_error import LIBRARY_BYTES, RAISE_LIMIT, explained
from levserve.device.sizing import human
from levserve.engine.engine import Engine
from levserve.models.entry import Counts, Resident
from levserve.models.group import Group
from levserve.models.registry import MakeRoom
from levserve.observe.metrics import Metrics
from levserve.settings.settings import Settings
from levserve.weights.source import find_with_draft

if TYPE_CHECKING:
    from levserve.models.build import Loaded

log = logging.getLogger(__name__)


def load(
    settings: Settings,
    metrics: Metrics,
    *,
    report: Callable[[str], None],
    make_room: MakeRoom | None = None,
    group: Group | None = None,
) -> Loaded:
    """Loads a model; slow. It gets the memory that `make_room` grants, or without one all that is free.

    The hosts of a `group` take the same steps together.
    """
    prefix = "" if make_room is None else f"{settings.main_name}: "

    def tell(*lines: str) -> None:
        for line in lines:
            log.info("%s%s", prefix, line)

    files = find_with_draft(settings, report)
    if group is not None:
        group.agree_on_model(files)
    if "jax" not in sys.modules:
        report("importing jax")
    libraries = f"{human(LIBRARY_BYTES)} for jax and its libraries"
    with explained(libraries, RAISE_LIMIT):
        # These import jax, which takes seconds to import and must not be touched before gunicorn forks.
        from levserve.gguf.header import keep_headers
        from levserve.models.build import build
        from levserve.models.choose import describe
        from levserve.models.probe import probe
        from levserve.models.read import read
        from levserve.models.size import reserve, size

    with keep_headers():
        with explained(libraries, RAISE_LIMIT):
            description = describe(settings, files)
        tell(*description.lines())
        allowed_bytes = None if make_room is None else reserve(description, make_room)
        contents = read(description, metrics, report)
    agree = None if group is None else group.agree_on_memory
    sizes = size(description, contents.weight_bytes, allowed_bytes=allowed_bytes, agree=agree)
    tell(*sizes.describe())
    loaded = build(description, contents, sizes, metrics, report, group)
    tell(f"prefill     {loaded.runner.prefill_token_seconds * 1000:.3g} ms a token")
    with explained("the arrays of a first prompt", "lower --kv-memory or --max-running"):
        scores = probe(loaded)
    tell(f"probe       {scores}")
    return loaded


def resident_of(engine: Engine, loaded: Loaded) -> Resident:
    """What other threads may know of a loaded model."""
    from levserve.models.reload import WeightReloader  # imports jax

    scheduler, sizes = loaded.scheduler, loaded.sizes

    def counts() -> Counts:
        pool = scheduler.pool
        pages = () if pool is None else (pool.num_held, pool.num_pages)
        return Counts(scheduler.num_running, scheduler.num_waiting, *pages)

    # The pool's tokens, scaled from the rows to all admitted requests: otherwise long chats would use up the
    # tokens and leave places in the queue empty.
    max_tokens = sizes.num_tokens * engine.max_inflight // sizes.rows
    return Resident(
        model=replace(loaded.model, max_inflight_tokens=max_tokens),
        weight_bytes=sizes.weight_bytes,
        kv_bytes=sizes.kv_bytes,
        backend=loaded.description.backend.describe(),
        reloader=WeightReloader(engine, loaded.description, loaded.model, loaded.group),
        counts=counts,
    )
