"""A model's files on disk, and where its tokenizer's are. No jax here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from levserve.errors import StartupError
from levserve.settings.settings import Settings
from levserve.weights.cache_folder import Lease
from levserve.weights.hub import ALLOW_PATTERNS, IGNORE_PATTERNS, fetch_repo
from levserve.weights.remote import Store, fetch_files, is_address

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: `path` is a folder with config.json and *.safetensors, a .gguf file, or a Levanter checkpoint.

    `name` is what to serve it as. `config_file` is a Levanter run's; `tokenizer` is where the tokenizer is if not at `path`.
    """

    name: str
    path: Path
    config_file: Path | None = None
    tokenizer: Path | None = None
    lease: Lease | None = field(default=None, compare=False, repr=False)


def find_tokenizer(name: str, settings: Settings, report: Report) -> Path:
    """A tokenizer's folder or .gguf file, by path, address or name on the Hub."""
    if is_address(name):
        store = Store(name)
        files = store.describe_all(
            [file for file in store.list_files() if is_wanted(file) and not file.endswith(".safetensors")]
        )
        if not files:
            raise StartupError(f"tokenizer {name}: there are no tokenizer files")
        return fetch_files(
            store, files, settings.cache_path, limit_bytes=settings.cache_size, report=report
        ).path
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII):
        return Path(name)
    return fetch_repo(
        name, revision="", cache_path=settings.cache_path / "hub", report=report, without=("*.safetensors",)
    )


def is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in ALLOW_PATTERNS) and not any(
        fnmatch(name, pattern) for pattern in IGNORE_PATTERNS
    )
