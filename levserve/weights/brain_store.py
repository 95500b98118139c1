"""Fetches an AI-OS brain from a store: its weights, its description and the tokenizer in its folder, if any.

A tokenizer elsewhere has to be named by the settings. Imports no jax.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from levserve.errors import StartupError
from levserve.weights.brain_folder import DESCRIPTION, parse_description, weight_names
from levserve.weights.fetch import fetch_files
from levserve.weights.model_files import ModelFiles
from levserve.weights.progress import Report
from levserve.weights.store import Store

# By name, because a web server cannot list its files.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)


def fetch_brain(
    store: Store, cache_path: Path, *, weights: str | None = None, limit_bytes: int, report: Report
) -> ModelFiles:
    """The brain in a store's folder, with the weights that are given, or else those that brain.json names."""
    fields = parse_description(store.read(DESCRIPTION) or b"{}", f"{store.shown}/{DESCRIPTION}")
    names = [weights] if weights else weight_names(fields)
    beside = [folder + name for folder in ("tokenizer/", "") for name in TOKENIZER_FILES]
    found = {file.name: file for file in store.describe_all([DESCRIPTION, *names, *beside])}
    wanted = next((name for name in names if name in found), None)
    if wanted is None:
        raise StartupError(f"{store.shown} is a brain without weights: there is none of {', '.join(names)}")
    files = [file for name, file in found.items() if name == wanted or name not in names]
    lease = fetch_files(store, files, cache_path, limit_bytes=limit_bytes, report=report)
    return ModelFiles(PurePosixPath(store.address).name, lease.path / wanted, lease=lease)
