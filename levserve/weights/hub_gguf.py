"""GGUF files on the Hugging Face Hub: `org/name/FILE.gguf`, or `org/name:Q4_K_M` as for llama.cpp and Ollama.

A repository often holds one model in many formats, each in a file or in several parts. The name must match
exactly one of them. Imports no jax.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from levserve.errors import StartupError
from levserve.gguf import parts
from levserve.weights.hub import fetch_named, list_repo
from levserve.weights.progress import Report

HOSTS = re.compile(r"^(?:hf\.co|huggingface\.co)/")
NAME = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<file>\w[\w./+-]*\.gguf)|:(?P<tag>\w[\w.+-]*))?", re.ASCII
)
NO_MODELS = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix)(?:[-._/]|$)", re.IGNORECASE)
"""Image encoders and importance matrices, which are stored beside the models."""
MAX_FILES_SHOWN = 40


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository and one of its GGUF files, given by its path (`file`) or by a part of its name (`tag`)."""

    repo: str
    file: str = ""
    tag: str = ""


def parse_hub_name(model: str) -> HubName | None:
    """None for what cannot be a name on the Hub."""
    found = NAME.fullmatch(HOSTS.sub("", model))
    if found is None or found["repo"].endswith(parts.SUFFIX):
        return None
    return HubName(found["repo"], found["file"] or "", found["tag"] or "")


def has_gguf(listed: Iterable[str]) -> bool:
    return any(map(_is_model, listed))


def fetch_gguf(name: HubName, *, revision: str, cache_path: Path, report: Report) -> Path:
    """The file, or the first part, in the cache; with all other parts beside it."""
    listed = list_repo(name.repo, revision=revision, cache_path=cache_path)
    first = choose_file(name, listed)
    files = _all_parts(first)
    if missing := sorted(set(files) - set(listed)):
        raise StartupError(f"cannot fetch {name.repo}/{first}: the repository has no {', '.join(missing)}")
    return fetch_named(name.repo, files, revision=revision, cache_path=cache_path, report=report) / first


def choose_file(name: HubName, listed: Iterable[str]) -> str:
    """The first part of the model that is meant. Unless one file matches, `StartupError` names the files."""
    files = sorted(file for file in listed if _is_model(file))
    meant = [file for file in files if _is_meant(name, file)]
    if len(meant) == 1:
        return meant[0]
    if not files:
        raise StartupError(f"{name.repo} on the Hugging Face Hub has no GGUF file")
    wanted = f" {name.file or name.tag}" if name.file or name.tag else " without a format, the name"
    problem = f"matches {len(meant)} GGUF files" if meant else "matches none of its GGUF files"
    told = _tell(meant or files)
    raise StartupError(
        f"{name.repo} on the Hugging Face Hub:{wanted} {problem}; name one as {name.repo}/{told}"
    )


def _is_model(file: str) -> bool:
    return (
        file.endswith(parts.SUFFIX)
        and not parts.is_later_part(PurePosixPath(file).name)
        and not NO_MODELS.search(file)
    )


def _is_meant(name: HubName, file: str) -> bool:
    if name.file:
        return name.file in _all_parts(file)
    if name.tag.endswith(parts.SUFFIX):  # Ollama takes a file's name as well
        return name.tag == PurePosixPath(file).name
    if not name.tag:
        return True
    stem = str(PurePosixPath(file).with_name(parts.model_name(PurePosixPath(file).name)))
    # Q4_K is not Q4_K_M, and Q4_XS not IQ4_XS.
    return re.search(rf"(?:^|[-._/]){re.escape(name.tag)}(?:[-./]|$)", stem, re.IGNORECASE) is not None


def _all_parts(file: str) -> list[str]:
    path = PurePosixPath(file)
    return [str(path.with_name(each)) for each in parts.part_names(path.name)]


def _tell(files: Sequence[str]) -> str:
    told = ", ".join(files[:MAX_FILES_SHOWN])
    return told if len(files) <= MAX_FILES_SHOWN else f"{told} and {len(files) - MAX_FILES_SHOWN} more"
