"""The commands besides serving: `levserve chat`, `generate`, `batch`, `models`, `fetch` and `eval`.

They run on the main thread of their own process. jax is imported when a model is opened.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from levserve.errors import ServeError, StartupError
from levserve.terminal.streams import prepare_streams

COMMANDS = {
    "chat": ("levserve.terminal.chat", "main"),
    "generate": ("levserve.terminal.generate", "main"),
    "batch": ("levserve.terminal.batch", "main"),
    "models": ("levserve.terminal.models", "list_main"),
    "fetch": ("levserve.terminal.models", "fetch_main"),
    "eval": ("levserve.evaluation.command", "main"),
}


def run_command(name: str, argv: Sequence[str]) -> int:
    """Runs a command and returns its exit code. A user's mistake gives one line on stderr and code 2."""
    module, function = COMMANDS[name]
    prepare_streams()
    try:
        code: int = getattr(importlib.import_module(module), function)(argv)
        return code
    except StartupError as error:
        print(f"levserve {name}: error: {error}", file=sys.stderr)
        return error.exit_code
    except ServeError as error:
        print(f"levserve {name}: error: {error.message}", file=sys.stderr)
        return 2 if error.status < 500 else 1
