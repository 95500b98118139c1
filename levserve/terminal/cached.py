"""The models in the cache: the bundled one, those of the Hugging Face Hub, and those of stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from levserve.gguf import parts
from levserve.settings.settings import Settings
from levserve.weights.bundled import SMOLLM2
from levserve.weights.fetch import STORES, read_address
from levserve.weights.hub_gguf import has_gguf
from levserve.weights.source import has_checkpoints, local_problem
from levserve.weights.store import is_address


class Found(NamedTuple):
    """A model by the name to give to levserve, where it is, and its size if that is known."""

    name: str
    place: str
    num_bytes: int | None


def find_cached(settings: Settings) -> Iterator[Found]:
    bundled = settings.cache_path / SMOLLM2.file_name
    if bundled.is_file():
        yield Found(SMOLLM2.name, str(bundled), bundled.stat().st_size)
    else:
        yield Found(SMOLLM2.name, "not downloaded yet; downloaded on first use", SMOLLM2.member_bytes)
    for repo in sorted((settings.cache_path / "hub").glob("models--*")):
        name = repo.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted((repo / "snapshots").glob("*")):
            revision = _revision(repo, snapshot.name)
            if local_problem(snapshot) is None:
                yield Found(name + revision, str(snapshot), size_of(snapshot))
            for file in _gguf_files(snapshot):
                own = f"{name}/{file.relative_to(snapshot).as_posix()}{revision}"
                yield Found(own, str(file), _size_of_gguf(file))
    for folder in sorted((settings.cache_path / STORES).glob("*")):
        yield from _find_stored(folder)


def _find_stored(folder: Path) -> Iterator[Found]:
    """The model that was fetched from a store; it can be served by its path if its address is not known."""
    if folder.name.startswith(".") or any(folder.rglob("*.part")):  # being removed, or not complete
        return
    address = read_address(folder)
    is_run = is_address(address) and has_checkpoints(folder)
    if is_run or local_problem(folder) is None:
        yield Found(address or str(folder), str(folder), size_of(folder))
    for file in _gguf_files(folder):
        name = address if address.endswith(parts.SUFFIX) else f"{address}/{file.name}"
        yield Found(name if is_address(address) else str(file), str(file), _size_of_gguf(file))


def size_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _revision(repo: Path, commit: str) -> str:
    """What names a commit: nothing for that of the main branch, which is the default."""
    for ref in sorted((repo / "refs").glob("*"), key=lambda ref: ref.name != "main"):
        if ref.is_file() and ref.read_text().strip() == commit:
            return "" if ref.name == "main" else f"@{ref.name}"
    return f"@{commit}"


def _gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of models, each by its first part, of those whose parts are all here."""
    files = sorted(file for file in folder.rglob(f"*{parts.SUFFIX}") if has_gguf([file.name]))
    return [file for file in files if all(part.is_file() for part in _parts_of(file))]


def _size_of_gguf(file: Path) -> int:
    return sum(part.stat().st_size for part in _parts_of(file))


def _parts_of(file: Path) -> list[Path]:
    return [file.with_name(name) for name in parts.part_names(file.name)]
