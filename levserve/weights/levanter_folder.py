"""Tells a Levanter checkpoint by the files in its folder, and finds the newest and the run's config.

Apart from what reads it, so that a start with any other model does without tensorstore.
"""

from __future__ import annotations

import json
from pathlib import Path

from levserve.errors import StartupError

CONFIG_FILE, METADATA_FILE, DATABASE_FILE = "config.yaml", "metadata.json", "manifest.ocdbt"
MODEL = "model"


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one whole checkpoint; Levanter writes metadata.json last."""
    return (folder / METADATA_FILE).is_file() and (
        (folder / DATABASE_FILE).is_file() or (folder / MODEL).is_dir()
    )


def step_of(metadata: str | bytes) -> int | None:
    """The training step a metadata.json tells; None for what is no metadata of a checkpoint."""
    try:
        step = json.loads(metadata)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def newest_checkpoint(folder: Path) -> Path:
    """The folder itself, or the complete checkpoint of the highest step in it."""
    if is_checkpoint(folder):
        return folder
    if not folder.is_dir():
        raise StartupError(f"checkpoint {folder} does not exist")
    steps = {
        path: step_of((path / METADATA_FILE).read_bytes())
        for path in sorted(folder.iterdir())
        if is_checkpoint(path)
    }
    known = {path: step for path, step in steps.items() if step is not None}
    if not known:
        raise StartupError(
            f"{folder} holds no complete Levanter checkpoint: expected {METADATA_FILE} and {DATABASE_FILE} (or a folder {MODEL}) "
            "in it or in a folder in it"
        )
    return max(known, key=lambda path: (known[path], path.name))


def find_config(folder: Path) -> Path | None:
    """The run's config.yaml in the checkpoint, or up to two folders above it."""
    places = (folder, *folder.resolve().parents[:2])
    return next((place / CONFIG_FILE for place in places if (place / CONFIG_FILE).is_file()), None)
