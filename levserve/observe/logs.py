"""What the server says on stderr: lines for people, or one JSON object a line for machines.

Everything that is logged in the process comes here, gunicorn's, jax's and Python's own warnings too. An event's numbers travel
in `extra`: those under "spoken" are in its message too, those under "fields" only there. Whatever a client sent may be in a
message or a field: control characters are written out, so that nobody can begin a line but this module.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from levserve.errors import StartupError

log = logging.getLogger(__name__)

INDENT = "    "  # before each line of a traceback; no other line begins with a space


class JsonFormatter(logging.Formatter):
    """One object a line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "spoken", {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Time, severity, message, and the fields that are set as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        pairs = [
            f"{name}={value}" for name, value in getattr(record, "fields", {}).items() if value is not None
        ]
        return " ".join(_one_line(text) for text in (super().formatMessage(record), *pairs))

    def formatException(self, exc_info: Any) -> str:
        return "\n".join(INDENT + _one_line(line) for line in super().formatException(exc_info).split("\n"))


def start_logging(level: str, style: str) -> None:
    """Called once, before the fork. Other libraries speak up only when something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("levserve").setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: log.critical(
        "uncaught exception", exc_info=(kind, error, trace)
    )
    threading.excepthook = _log_thread_failure


def log_settings(settings: Mapping[str, tuple[str, str]]) -> None:
    """Tells what each setting is and where it was set: machines all of them, people those that are no defaults."""
    spoken = {
        "settings": {name: {"value": value, "source": source} for name, (value, source) in settings.items()}
    }
    given = [
        f"{name} = {value} ({source})" for name, (value, source) in settings.items() if source != "default"
    ]
    log.info("settings: %s", ", ".join(given) or "all are defaults", extra={"spoken": spoken})


def complain(error: StartupError) -> None:
    """The one line about a server that cannot start."""
    if _speaks_json():
        log.critical("%s", error, extra={"fields": {"exit_code": error.exit_code}})
    else:
        print(f"levserve: error: {error}", file=sys.stderr, flush=True)


def adopt_libraries() -> None:
    """Takes away the handlers that libraries gave themselves when they were imported: their lines come here like all others."""
    for name in ("huggingface_hub", "transformers"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def _speaks_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _log_thread_failure(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "?"
    log.critical("the thread %s failed", name, exc_info=args.exc_value)


def _one_line(text: str) -> str:
    """The text with every character that a terminal or a reader of lines could take for more than a character written out."""
    return (
        text
        if text.isprintable()
        else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    )
