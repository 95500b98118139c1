"""Logging to stderr: lines for people, or one JSON object per line for machines.

Everything logged in the process comes here, including what gunicorn, jax and Python's warnings log. An event
passes its data in `extra`: "fields" are shown after the message, "message_fields" are already part of it and
only added to the JSON. Text from clients may be in either, so control characters are escaped: a client cannot
forge a log line.
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

INDENT = "    "  # before each line of a traceback; no other line starts with a space


class JsonFormatter(logging.Formatter):
    """One ASCII object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "message_fields", {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Time, severity, message, and each field that is not None as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        parts = [super().formatMessage(record)]
        for name, value in getattr(record, "fields", {}).items():
            if value is not None:
                parts.append(f"{name}={value}")
        return " ".join(_one_line(part) for part in parts)

    def formatException(self, exc_info: Any) -> str:
        return "\n".join(INDENT + _one_line(line) for line in super().formatException(exc_info).split("\n"))


def start_logging(level: str, style: str, *, file: str = "") -> None:
    """Called once, before the fork. Other libraries log only warnings and errors, the default level.

    A logging file decides everything, except that a `level` that is given overrides the file's.
    """
    if file:
        # Imported here, because it imports yaml, which would delay every start.
        from levserve.observe.logging_file import configure_logging

        configure_logging(file)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
        logging.basicConfig(handlers=[handler])
    if level:
        logging.getLogger("levserve").setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = lambda *exc_info: log.critical("uncaught exception", exc_info=exc_info)
    threading.excepthook = _log_thread_failure


def log_settings(settings: Mapping[str, tuple[str, str]]) -> None:
    """Logs the settings that are not defaults as text, and the values and sources of all settings as JSON."""
    everything = {}
    given = []
    for name, (value, source) in settings.items():
        everything[name] = {"value": value, "source": source}
        if source != "default":
            given.append(f"{name} = {value} ({source})")
    message_fields = {"settings": everything}
    log.info("settings: %s", ", ".join(given) or "all defaults", extra={"message_fields": message_fields})


def report_startup_error(error: StartupError) -> None:
    """Writes the one line that says why the server cannot start."""
    handlers = logging.getLogger().handlers
    has_json = any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)
    is_on_stderr = any(getattr(handler, "stream", None) is sys.stderr for handler in handlers)
    if has_json:
        log.critical("%s", error, extra={"fields": {"exit_code": error.exit_code}})
    if not has_json or not is_on_stderr:
        print(f"levserve: error: {error}", file=sys.stderr, flush=True)


def redirect_library_logs() -> None:
    """Removes the handlers that libraries install on import, so that their messages come here too."""
    for name in ("huggingface_hub", "transformers"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def _log_thread_failure(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "?"
    log.critical("thread %s failed", name, exc_info=args.exc_value)


def _one_line(text: str) -> str:
    """Escapes every character that is not printable, such as line breaks and terminal sequences."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
