"""Finds the files of an AI-OS brain: its weights, its description and the folder of its tokenizer.

A brain is a folder with `actv1_student.safetensors` or `actv1_student.pt`, and usually a `brain.json`. It may
also be named by its weights file. Its tokenizer is often elsewhere, at a path that was valid on the machine
that trained it. Called before the fork, so this module imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from levserve.errors import StartupError, cause_of
from levserve.weights.config_fields import Fields

DESCRIPTION = "brain.json"
STUDENTS = ("actv1_student.safetensors", "actv1_student.pt")
SUFFIXES = (".safetensors", ".pt")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
STARTER = "starter_brain.json"
ROOT = "artifacts"
"""The folder of AI-OS that relative paths begin with."""


@dataclass(frozen=True, slots=True)
class BrainFiles:
    """A brain on disk; `fields` are those of its brain.json, none if it has no such file."""

    folder: Path
    weights: Path
    fields: Fields


def is_brain(path: Path) -> bool:
    """Whether a folder or a file looks like a brain, even an incomplete one."""
    if path.is_file():
        return path.suffix in SUFFIXES
    return any((path / name).is_file() for name in (DESCRIPTION, STARTER, *STUDENTS))


def find_brain(path: Path) -> BrainFiles:
    """The files of a brain; raises `StartupError` for a folder without weights."""
    folder = path.parent if path.is_file() else path
    fields = _read_description(folder / DESCRIPTION)
    if path.is_file():
        return BrainFiles(folder, path, fields)
    names = weight_names(fields)
    for name in names:
        if (folder / name).is_file():
            return BrainFiles(folder, folder / name, fields)
    if (folder / STARTER).is_file():
        raise StartupError(
            f"{folder} holds a starter brain, which is an ordinary model with a halting head beside it that "
            "does not change its answers: serve the model's own folder"
        )
    raise StartupError(f"{folder} is a brain without weights: there is none of {', '.join(names)}")


def weight_names(fields: Fields) -> list[str]:
    """The possible names of the weights file, preferred ones first."""
    named = [fields.get("checkpoint_file"), fields.get("student_pt")]
    # Paths may be from another machine, or from Windows; the file is in the brain's folder in any case.
    names = [PureWindowsPath(name).name for name in named if isinstance(name, str) and name]
    return list(dict.fromkeys((*names, *STUDENTS)))


def find_brain_tokenizer(brain: BrainFiles) -> Path:
    """The folder of the tokenizer that brain.json names, wherever it may have been copied to."""
    tried = list(dict.fromkeys(_tokenizer_places(brain)))
    for place in tried:
        if any((place / name).is_file() for name in TOKENIZER_FILES):
            return place
    places = ", ".join(str(place) for place in tried)
    raise StartupError(
        f"{brain.folder}: no tokenizer was found; name its folder with --tokenizer (tried {places})"
    )


def _tokenizer_places(brain: BrainFiles) -> Iterator[Path]:
    folder = brain.folder.absolute()
    named = brain.fields.get("tokenizer_model")
    if isinstance(named, str) and named:
        yield Path(named)
        parts = named.replace("\\", "/").split("/")
        if ROOT in parts:
            below_root = Path(*parts[parts.index(ROOT) :])
            for ancestor in folder.parents:
                yield ancestor / below_root
    yield folder / "tokenizer"
    yield folder


def _read_description(path: Path) -> Fields:
    try:
        return parse_description(path.read_bytes(), str(path))
    except FileNotFoundError:
        return Fields(str(path), {})
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {cause_of(error)}") from error


def parse_description(text: bytes, place: str) -> Fields:
    """The fields of a brain.json; `place` is where it was read, for errors."""
    try:
        content = json.loads(text.decode("utf-8-sig"))
    except ValueError as error:
        raise StartupError(f"{place}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{place}: not a JSON object")
    return Fields(place, content)
