"""`levserve eval`: the command of lm-evaluation-harness, with the model `levserve` among its models."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from levserve.errors import ConfigError
from levserve.settings.environment import read_environment

DESCRIPTION = """\
Evaluates a model with lm-evaluation-harness, in this process and without a server.

  levserve eval --tasks arc_easy --limit 100
  levserve eval --model_args pretrained=Qwen/Qwen3-0.6B,max_running=64 --tasks mmlu,gsm8k
  levserve eval ls tasks

The arguments are those of lm_eval, whose model is levserve unless another is named; model_args takes
pretrained (default: the bundled model) and settings of the server by their names. `levserve eval run --help`
explains all of them. It needs: pip install 'levserve[eval]'.
"""
OTHER_COMMANDS = ("ls", "validate")
"""Subcommands of the harness that need no model."""


def main(argv: Sequence[str]) -> int:
    """Runs `lm_eval` with these arguments, and `--model levserve` unless they name another model."""
    if not argv or argv[0] in ("-h", "--help"):
        print(DESCRIPTION, end="")
        raise SystemExit(0)
    try:
        importlib.import_module("levserve.evaluation.harness")  # registers the model; the package is an extra
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise ConfigError(
            f"lm-evaluation-harness cannot be imported ({error}); pip install 'levserve[eval]'"
        ) from None
    os.environ.update(read_environment(None, os.environ).added)
    sys.argv = ["levserve eval", *complete_arguments(argv)]
    cli_evaluate()
    return 0


def complete_arguments(argv: Sequence[str]) -> list[str]:
    """The arguments for `lm_eval`."""
    if argv[0] in OTHER_COMMANDS:
        return list(argv)
    given = argv[1:] if argv[0] == "run" else argv
    names_model = any(word in ("--model", "-M") or word.startswith("--model=") for word in given)
    return ["run", *([] if names_model else ["--model", "levserve"]), *given]
