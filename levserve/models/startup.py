"""From settings to a running device thread, or to a dry run of what it would serve.

`start_device_thread` is called in the worker process, after the fork. The thread that it starts imports jax.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from levserve.device.faults import install, parse_faults
from levserve.engine.engine import IDLE_BEAT_SECONDS, Engine
from levserve.engine.messages import DeviceTask, Stop
from levserve.errors import FAULT_EXIT_CODE, StartupError
from levserve.models.catalogue import Catalogue
from levserve.models.follow import follow
from levserve.models.group import Group
from levserve.models.load import load, resident_of
from levserve.models.loader import load_first, open_catalogue
from levserve.models.registry import Registry
from levserve.observe.logs import report_startup_error
from levserve.observe.metrics import Metrics
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.settings.settings import Settings

if TYPE_CHECKING:
    from levserve.models.build import Loaded

log = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 1.0
"""How long HTTP threads get to tell their clients that the device failed."""


def start_device_thread(settings: Settings, registry: Registry) -> threading.Thread:
    """Starts the thread that owns the device. If it fails, it ends the process."""
    thread = threading.Thread(
        target=_device_main, args=(settings, registry), name="levserve-device", daemon=True
    )
    thread.start()
    return thread


def _device_main(settings: Settings, registry: Registry) -> None:
    engine = registry.engine

    def report(progress: str) -> None:
        engine.progress = progress
        engine.beat()
        log.info("%s", progress)

    try:
        if settings.faults:
            install(parse_faults(settings.faults))
        if settings.lazy:
            serve_lazily(settings, registry)
            return
        if settings.has_several:
            loaded, others = load_first(settings, registry, report=report)
        elif settings.num_hosts > 1 and settings.host_id:
            follow(settings, engine, report=report)
            return
        else:
            loaded, others = _load_one(settings, engine, report=report), []
        serve(registry, loaded, others)
    except StartupError as error:
        report_startup_error(error)
        os._exit(error.exit_code)
    except BaseException:
        log.critical("the device thread failed", exc_info=True)
        engine.fail()
        time.sleep(LAST_WORDS_SECONDS)
        os._exit(FAULT_EXIT_CODE)


def _load_one(settings: Settings, engine: Engine, *, report: Callable[[str], None]) -> Loaded:
    """The only model, on this host or on all of its group."""
    if settings.num_hosts == 1:
        return load(settings, engine.metrics, report=report)
    group = Group(settings, engine)
    group.gather(report)
    try:
        return load(settings, engine.metrics, report=report, group=group)
    except StartupError as error:
        group.give_up(error)
        raise


def dry_run(settings: Settings, *, num_threads: int) -> None:
    """Tries the one model, or the default and each with a section; raises `StartupError` if one fails."""
    if settings.has_several:
        catalogue = Catalogue(settings)
        print(f"models      {', '.join(catalogue.names())}")
        for name in dict.fromkeys((catalogue.default, *settings.models)):
            try:
                _try_model(catalogue.find(name) or settings)
            except StartupError as error:
                raise type(error)(f"model {name}: {error}") from error
    else:
        _try_model(settings)
    print(f"threads     {num_threads} for HTTP, 1 for the device")


def _try_model(settings: Settings) -> None:
    """Loads, compiles and generates one token, prints the memory plan, and gives the memory back."""
    loaded = load(settings, Metrics(), report=lambda progress: log.info("%s", progress))
    prompt = loaded.model.tokenizer.encode("Hello") or [0]
    loaded.scheduler.add(GenerationRequest("dry-run", tuple(prompt), 1, Sampling(temperature=0.0)))
    in_flight = loaded.runner.dispatch(loaded.scheduler.plan())
    (update,) = loaded.scheduler.commit(in_flight.plan, *in_flight.read())
    print(f"model       {loaded.model.name}: one token generated, {update.batch.tokens or 'a stop token'}")
    print("\n".join(loaded.sizes.describe()))
    loaded.runner.free()


def serve(registry: Registry, loaded: Loaded, others: Sequence[str] = ()) -> None:
    """Publishes the first model, starts loading others, and runs the device loop until it is stopped."""
    from levserve.device.loop import DeviceLoop

    engine = registry.engine
    loaded.runner.programs.start_background()
    engine.progress = "ready"
    loop = DeviceLoop(engine, loaded.description.devices[0])
    loop.attach(loaded.attach())
    registry.publish(resident_of(engine, loaded))
    log.info("admitting   %d requests, %d tokens", engine.max_inflight, engine.admission.max_tokens)
    for name in others:
        registry.begin_load(name)
    loop.run()


def serve_lazily(settings: Settings, registry: Registry) -> None:
    """Accepts requests at once; the first one makes a model load, and only then is jax imported."""
    engine = registry.engine
    catalogue = Catalogue(settings)
    open_catalogue(catalogue, settings, registry)
    engine.progress = "ready; models are loaded when requests ask for them"
    registry.open(catalogue.default)
    first = _wait_for_task(engine)
    if first is None:
        return
    import jax

    from levserve.device.loop import DeviceLoop
    from levserve.device.tasks import Attach

    assert isinstance(first, Attach)  # any other task is about a model that is already attached
    loop = DeviceLoop(engine, jax.devices()[0])
    loop.attach(first)
    loop.run()


def _wait_for_task(engine: Engine) -> DeviceTask | None:
    """The first task for the device thread; None if it is stopped before there is one."""
    while True:
        engine.beat()
        try:
            message = engine.inbox.get(timeout=IDLE_BEAT_SECONDS)
        except queue.Empty:
            continue
        if isinstance(message, Stop):
            return None
        if isinstance(message, DeviceTask):
            return message
