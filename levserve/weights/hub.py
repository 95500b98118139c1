"""Downloads a model from the Hugging Face Hub into the cache. Imports no jax.

Only what serving needs is downloaded: configuration, tokenizer and weights in the repository's top folder.
Weights are safetensors, and PyTorch's files only if there are none; `hub_gguf.py` chooses GGUF files.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any

from levserve.errors import StartupError
from levserve.weights.progress import INTERVAL_SECONDS, Report

ALLOW_PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.txt",
    "tokenizer.model",
    "*.tiktoken",
    "adapter_model.bin",
]
IGNORE_PATTERNS = ["*/*", "consolidated*.safetensors"]  # Meta and Mistral publish the weights twice
SAFETENSORS, TORCH_FILES = "*.safetensors", "pytorch_model*.bin"


def needed_files(names: Sequence[str], *, with_weights: bool = True) -> list[str]:
    """The files of a folder that serving its model needs."""
    needed = [name for name in names if _is_needed(name)]
    if not with_weights:
        return [name for name in needed if not fnmatch(name, SAFETENSORS)]
    if any(fnmatch(name, SAFETENSORS) for name in needed):
        return needed
    return needed + [name for name in names if fnmatch(name, TORCH_FILES) and "/" not in name]


def has_weights(names: Iterable[str]) -> bool:
    return any(fnmatch(name, SAFETENSORS) or fnmatch(name, TORCH_FILES) for name in names)


def _is_needed(name: str) -> bool:
    is_allowed = any(fnmatch(name, pattern) for pattern in ALLOW_PATTERNS)
    return is_allowed and not any(fnmatch(name, pattern) for pattern in IGNORE_PATTERNS)


def fetch_repo(
    repo: str, *, revision: str, cache_path: Path, report: Report, with_weights: bool = True
) -> Path:
    """The folder with the repository's files; files that are in the cache are not downloaded again.

    An empty revision is the main branch.
    """
    without = IGNORE_PATTERNS if with_weights else [*IGNORE_PATTERNS, SAFETENSORS]
    folder = _fetch(repo, revision, cache_path, report, ALLOW_PATTERNS, without)
    if with_weights and not any(folder.glob(SAFETENSORS)):
        _fetch(repo, revision, cache_path, report, [TORCH_FILES], IGNORE_PATTERNS)
    return folder


def list_repo(repo: str, *, revision: str, cache_path: Path) -> list[str]:
    """The names of the repository's files; if the Hub cannot be reached, of those in the cache."""
    from huggingface_hub import HfApi

    try:
        with _as_startup_error(repo, revision):
            # Without a network, huggingface_hub would retry listing the tree for 24 s.
            info = HfApi().model_info(repo, revision=revision or None)
            return [sibling.rfilename for sibling in info.siblings or ()]
    except StartupError:
        if cached := _list_cached(repo, revision, cache_path):
            return cached
        raise


def fetch_named(repo: str, names: Sequence[str], *, revision: str, cache_path: Path, report: Report) -> Path:
    """The folder with the files of these names; files that are in the cache are not downloaded again."""
    return _fetch(repo, revision, cache_path, report, [*map(escape, names)], without=[])


def _list_cached(repo: str, revision: str, cache_path: Path) -> list[str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:  # the pattern matches no file, so none can be missing
        found = snapshot_download(
            repo, revision=revision or None, cache_dir=cache_path, allow_patterns="/", local_files_only=True
        )
    except LocalEntryNotFoundError:
        return []
    folder = Path(found)
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _fetch(
    repo: str, revision: str, cache_path: Path, report: Report, patterns: list[str], without: list[str]
) -> Path:
    # Imported here because it takes 0.3 s, which a start from local files need not pay.
    from huggingface_hub import snapshot_download

    with _as_startup_error(repo, revision):
        folder = snapshot_download(
            repo,
            revision=revision or None,
            cache_dir=cache_path,
            allow_patterns=patterns,
            ignore_patterns=without,
            tqdm_class=_reporting_bar(repo, report),
        )
    return Path(folder)


@contextmanager
def _as_startup_error(repo: str, revision: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into one line that names the repository."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # The base classes are OSError and the error class of the HTTP library that this version uses.
    http_errors: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, ValueError)
    try:
        yield
    except GatedRepoError as error:
        raise StartupError(
            f"cannot fetch {repo}: it is gated; ask for access on huggingface.co and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise StartupError(
            f"cannot fetch {repo}: no such model on the Hub, or a private one (set HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise StartupError(f"cannot fetch {repo}: it has no revision {revision!r}") from error
    except http_errors as error:
        raise StartupError(f"cannot fetch {repo} from the Hugging Face Hub: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _reporting_bar(repo: str, report: Report) -> Any:
    """A progress bar class for huggingface_hub that reports lines instead of drawing a bar."""
    from huggingface_hub.utils.tqdm import tqdm

    last_time = time.monotonic()

    class ReportingBar(tqdm):
        monitor_interval = 0  # tqdm would start a thread to redraw bars

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"disable": False, "file": io.StringIO()}
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def display(self, *args: Any, **kwargs: Any) -> None:
            """Draws nothing; bars that huggingface_hub leaves open would draw once more when collected."""

        def refresh(self, *args: Any, **kwargs: Any) -> None:
            nonlocal last_time
            now = time.monotonic()
            if self.unit == "B" and self.n and now - last_time >= INTERVAL_SECONDS:
                last_time = now
                report(f"fetching {repo}: {self.n / 1e6:,.0f} of {(self.total or self.n) / 1e6:,.0f} MB")

    return ReportingBar
