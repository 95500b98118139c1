"""Finds the files of the model to serve: bundled, a folder, a GGUF file, a repository on the Hub, a store, a Levanter run.

`check_source` is for the command line, before anything heavy starts; `find_source` is for the start itself and may download.
No jax here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from levserve.errors import ConfigError, StartupError
from levserve.settings.settings import Settings
from levserve.weights.bundled import SMOLLM2, find_bundled
from levserve.weights.files import ModelFiles, find_tokenizer, is_wanted
from levserve.weights.hub import fetch_repo
from levserve.weights.remote import Store, check_address, fetch_files, is_address

ACCEPTED = (
    f"{SMOLLM2.name}, a folder with config.json and *.safetensors, a .gguf file, an org/name on the Hugging Face Hub, "
    "or a gs://, s3:// or http(s):// address of such a folder or file"
)
REPO_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
GGUF_SUFFIX = ".gguf"
# What a web server without listings is asked for.
KNOWN_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
)

Report = Callable[[str], None]


def check_source(settings: Settings) -> None:
    """Refuses what can be known to be wrong without reading weights or the network."""
    if settings.checkpoint_path:
        if is_address(settings.checkpoint_path):
            check_address(settings.checkpoint_path)
        elif not Path(settings.checkpoint_path).is_dir():
            raise ConfigError(
                f"--checkpoint-path {settings.checkpoint_path!r} is not a folder with a Levanter checkpoint or several"
            )
    else:
        check_model(stored_name(settings.model, settings.model_store))


def find_source(settings: Settings, report: Report, *, with_tokenizer: bool = True) -> ModelFiles:
    """The files of what the settings say to serve, fetched when they are not on disk."""
    if settings.checkpoint_path:
        from levserve.weights.levanter_run import (
            find_run,  # brings jax, which a check before the fork must not
        )

        files = find_run(settings, report, with_tokenizer=with_tokenizer and not settings.tokenizer)
    else:
        address = stored_name(settings.model, settings.model_store)
        files = find_model(
            address,
            revision=settings.revision,
            cache_path=settings.cache_path,
            report=report,
            limit_bytes=settings.cache_size,
        )
        if address != settings.model:
            files = ModelFiles(settings.model, files.path, lease=files.lease)
    if not settings.tokenizer or not with_tokenizer:
        return files
    tokenizer = find_tokenizer(settings.tokenizer, settings, report)
    return ModelFiles(files.name, files.path, files.config_file, tokenizer, files.lease)


def stored_name(model: str, store: str) -> str:
    """Where a model's name is kept in the store, if there is one: org/name is the folder org-name."""
    if not store or model == SMOLLM2.name or is_address(model) or Path(model).expanduser().exists():
        return model
    return f"{store.rstrip('/')}/{model.replace('/', '-')}"


def check_model(model: str) -> None:
    """Refuses what can be known to be wrong without reading weights or the network."""
    if is_address(model):
        check_address(model)
        return
    path = Path(model).expanduser()
    if model == SMOLLM2.name or (not path.exists() and _is_repo_name(model)):
        return
    if problem := local_problem(path):
        raise ConfigError(f"model {model!r} {problem}; accepted are {ACCEPTED}")


def find_model(
    model: str, *, revision: str, cache_path: Path, report: Report, limit_bytes: int = 0
) -> ModelFiles:
    """The model's files, fetched into `cache_path` when they are not on disk."""
    check_model(model)
    if model == SMOLLM2.name:
        return ModelFiles(model, find_bundled(cache_path, report))
    if is_address(model):
        return _fetch_model(model, cache_path, limit_bytes, report)
    path = Path(model).expanduser()
    if path.is_file():
        return ModelFiles(path.stem, path)
    if path.is_dir():
        return ModelFiles(path.resolve().name, path)
    folder = fetch_repo(model, revision=revision, cache_path=cache_path / "hub", report=report)
    if problem := local_problem(folder):
        raise StartupError(f"model {model!r} on the Hugging Face Hub {problem}")
    return ModelFiles(model, folder)


def _fetch_model(address: str, cache_path: Path, limit_bytes: int, report: Report) -> ModelFiles:
    store = Store(address)
    name = PurePosixPath(store.address).name
    if name.endswith(GGUF_SUFFIX):
        file = store.describe("")
        if file is None:
            raise StartupError(f"model {address} does not exist")
        lease = fetch_files(store, [file], cache_path, limit_bytes=limit_bytes, report=report)
        return ModelFiles(name.removesuffix(GGUF_SUFFIX), lease.path / file.name, lease=lease)
    files = store.describe_all(_model_files(store))
    names = [file.name for file in files]
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        held = f"it holds {', '.join(sorted(names)[:8])}" if names else "there is nothing"
        raise StartupError(f"model {address}: expected config.json and *.safetensors; {held}")
    lease = fetch_files(store, files, cache_path, limit_bytes=limit_bytes, report=report)
    return ModelFiles(name, lease.path, lease=lease)


def _model_files(store: Store) -> list[str]:
    """What serving needs of a Hugging Face folder in a store."""
    listed = [name for name in store.list_files() if is_wanted(name)]
    if listed or not store.address.startswith("http"):
        return listed
    index = store.read("model.safetensors.index.json") or b""
    return sorted({*KNOWN_FILES, *re.findall(r'"([\w.-]+\.safetensors)"', index.decode(errors="replace"))})


def _is_repo_name(model: str) -> bool:
    return REPO_NAME.fullmatch(model) is not None and not model.endswith(GGUF_SUFFIX)


def local_problem(path: Path) -> str | None:
    """What keeps a file or folder from being a model, as the rest of a sentence."""
    if not path.exists():
        return "does not exist"
    if path.is_file():
        return (
            None
            if path.suffix == GGUF_SUFFIX
            else f"is a file of an unknown type ({path.suffix or 'no suffix'})"
        )
    if not (path / "config.json").is_file():
        return "is a folder without config.json"
    if not any(path.glob("*.safetensors")):
        return "is a folder without *.safetensors"
    return None
