"""Finds the files of the model that `--model` names: bundled, a folder, a GGUF file, or a repository on the Hub.

`check_model` is for the command line, before anything heavy starts; `find_model` is for the start itself and may download.
No jax here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from levserve.errors import ConfigError, StartupError
from levserve.weights.bundled import SMOLLM2, find_bundled
from levserve.weights.hub import fetch_repo

ACCEPTED = f"{SMOLLM2.name}, a folder with config.json and *.safetensors, a .gguf file, or an org/name on the Hugging Face Hub"
REPO_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
GGUF_SUFFIX = ".gguf"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: `path` is a folder with config.json and *.safetensors, or a .gguf file; `name` is what to serve it as."""

    name: str
    path: Path


def check_model(model: str) -> None:
    """Refuses what can be known to be wrong without reading weights or the network."""
    path = Path(model).expanduser()
    if model == SMOLLM2.name or (not path.exists() and _is_repo_name(model)):
        return
    if problem := _local_problem(path):
        raise ConfigError(f"model {model!r} {problem}; accepted are {ACCEPTED}")


def find_model(model: str, *, revision: str, cache_path: Path, report: Callable[[str], None]) -> ModelFiles:
    """The model's files, fetched into `cache_path` when they are not on disk."""
    check_model(model)
    if model == SMOLLM2.name:
        return ModelFiles(model, find_bundled(cache_path, report))
    path = Path(model).expanduser()
    if path.is_file():
        return ModelFiles(path.stem, path)
    if path.is_dir():
        return ModelFiles(path.resolve().name, path)
    folder = fetch_repo(model, revision=revision, cache_path=cache_path / "hub", report=report)
    if problem := _local_problem(folder):
        raise StartupError(f"model {model!r} on the Hugging Face Hub {problem}")
    return ModelFiles(model, folder)


def _is_repo_name(model: str) -> bool:
    return REPO_NAME.fullmatch(model) is not None and not model.endswith(GGUF_SUFFIX)


def _local_problem(path: Path) -> str | None:
    """What keeps a file or folder from being a model, as the rest of a sentence."""
    if not path.exists():
        return "does not exist"
    if path.is_file():
        return None if path.suffix == GGUF_SUFFIX else f"is a file of an unknown type ({path.suffix or 'no suffix'})"
    if not (path / "config.json").is_file():
        return "is a folder without config.json"
    if not any(path.glob("*.safetensors")):
        return "is a folder without *.safetensors"
    return None
