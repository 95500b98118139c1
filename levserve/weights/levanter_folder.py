"""Recognises a Levanter checkpoint by its files, and finds the newest one and the run's config.

`levanter_checkpoint.py` reads the checkpoint; it imports tensorstore, which other formats do not need.
"""

from __future__ import annotations

import json
from pathlib import Path

from levserve.errors import StartupError

CONFIG_FILE, METADATA_FILE, DATABASE_FILE = "config.yaml", "metadata.json", "manifest.ocdbt"
MODEL = "model"


def is_levanter_checkpoint(folder: Path) -> bool:
    """Whether a folder is one complete checkpoint; Levanter writes metadata.json last."""
    has_arrays = (folder / DATABASE_FILE).is_file() or (folder / MODEL).is_dir()
    return has_arrays and (folder / METADATA_FILE).is_file()


def step_of(metadata: str | bytes) -> int | None:
    """The training step in the content of a metadata.json; None if it is not a checkpoint's."""
    try:
        step = json.loads(metadata)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def newest_checkpoint(folder: Path) -> Path:
    """The folder itself, or the complete checkpoint with the highest step in it."""
    if is_levanter_checkpoint(folder):
        return folder
    if not folder.is_dir():
        raise StartupError(f"checkpoint {folder} does not exist")
    steps: dict[Path, int] = {}
    for path in folder.iterdir():
        step = step_of((path / METADATA_FILE).read_bytes()) if is_levanter_checkpoint(path) else None
        if step is not None:
            steps[path] = step
    if not steps:
        expected = f"expected {METADATA_FILE} and {DATABASE_FILE} (or a folder {MODEL})"
        raise StartupError(
            f"{folder} holds no complete Levanter checkpoint: {expected} in it or in one of its folders"
        )
    return max(steps, key=lambda path: (steps[path], path.name))


def find_config(folder: Path) -> Path | None:
    """The run's config.yaml in the checkpoint, or up to two folders above it."""
    for place in (folder, *folder.resolve().parents[:2]):
        if (place / CONFIG_FILE).is_file():
            return place / CONFIG_FILE
    return None
