"""The command `levserve`: reads the settings, checks them, and serves; or runs one of its other commands.

Runs on the main thread of the process that becomes gunicorn's arbiter, so it does not import jax.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Sequence

from levserve.device.bytecode import keep_bytecode
from levserve.device.malloc import tune_malloc
from levserve.device.memory_error import RAISE_LIMIT
from levserve.device.rows import resolve_rows
from levserve.device.threads import set_threads
from levserve.errors import StartupError
from levserve.models.registry import Registry
from levserve.observe.logs import report_startup_error, start_logging
from levserve.server import num_threads, serve
from levserve.settings.file import did_you_mean
from levserve.settings.parse import parse_settings
from levserve.settings.settings import Settings
from levserve.terminal.commands import COMMANDS, run_command
from levserve.web import request_log

log = logging.getLogger(__name__)

COLLECT_AFTER = 50_000
"""New objects between two garbage collections until models are loaded. Importing jax creates 180,000 objects.
With Python's default of 700 they would be scanned again and again: 0.3 s of the 2 s that the imports take."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; a user's mistake is reported in one line on stderr."""
    gc.set_threshold(COLLECT_AFTER)
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in COMMANDS:
        return run_command(words[0], words[1:])
    settings = parse_settings(argv)
    try:
        return _run(settings)
    except StartupError as error:
        report_startup_error(_with_command(error, words, settings))
        return error.exit_code
    except MemoryError:
        report_startup_error(StartupError(f"out of memory before a model was loaded; {RAISE_LIMIT}"))
        return StartupError.exit_code


def _with_command(error: StartupError, words: Sequence[str], settings: Settings) -> StartupError:
    """The error, with a hint if a model that cannot be served may be a mistyped command: `levserve chta`."""
    if not words or words[0] != settings.model or "model" not in str(error):
        return error
    hint = did_you_mean(words[0], COMMANDS).replace("mean ", "mean levserve ")
    return type(error)(f"{error}{hint}")


def _run(settings: Settings) -> int:
    from levserve.weights.source import check_source

    _start_logging(settings)
    if settings.has_several:
        from levserve.models.catalogue import check_models

        check_models(settings)
    else:
        check_source(settings)
    if settings.faults:
        _announce_faults(settings.faults)
    settings = resolve_rows(settings)
    set_threads(settings.threads)
    keep_bytecode(settings.cache_path / "bytecode")
    tune_malloc()  # before there are threads; the worker process inherits it
    if settings.dry_run:
        from levserve.models.startup import dry_run

        dry_run(settings, num_threads=num_threads(settings))
        return 0
    serve(settings, _start_device)


def _start_logging(settings: Settings) -> None:
    level, file = settings.log_level, settings.logging_config
    if file and "log_level" not in settings.sources:
        level = ""
    start_logging(level, settings.log_format, file=file)
    if not settings.access_log:
        logging.getLogger(request_log.__name__).setLevel(logging.WARNING)
    if file and "log_format" in settings.sources:
        log.warning("--log-format %s is not used: --logging-config %s is given", settings.log_format, file)
    for note in settings.notes:
        log.info("%s", note)


def _announce_faults(faults: str) -> None:
    from levserve.device.faults import parse_faults

    parse_faults(faults)
    log.warning("FAULT INJECTION IS ON: this server will break on purpose: %s", faults)


def _start_device(settings: Settings, registry: Registry) -> threading.Thread:
    """Called in the worker: jax must not be imported before the fork."""
    from levserve.models.startup import start_device_thread

    return start_device_thread(settings, registry)
