"""Finds a Levanter run's newest checkpoint, its config and its tokenizer, on disk or in a store.

From a store, a checkpoint that is an OCDBT database is downloaded as a whole, because its files mix the model
with the optimizer's state. Of the older layout only the model's arrays are downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from levserve.errors import StartupError
from levserve.settings.credentials import without_credentials
from levserve.settings.settings import Settings
from levserve.weights.cache_folder import Lease
from levserve.weights.fetch import fetch_files
from levserve.weights.levanter_config import read_tokenizer_name
from levserve.weights.levanter_folder import (
    CONFIG_FILE,
    METADATA_FILE,
    find_config,
    newest_checkpoint,
    step_of,
)
from levserve.weights.model_files import ModelFiles, find_tokenizer
from levserve.weights.progress import Report
from levserve.weights.store import RemoteFile, Store, is_address

STEP = re.compile(r"step-\d+")
NEEDED = re.compile(
    r"(d|ocdbt\.process_\d+(/d)?|model(/.+)?|tokenizer)/[^/]+|"
    r"ocdbt\.process_\d+/[^/]+|[^/]+\.(json|yaml|ocdbt)"
)


def find_run(settings: Settings, report: Report, *, with_tokenizer: bool) -> ModelFiles:
    """The newest complete checkpoint at --checkpoint-path, downloaded if it is in a store."""
    if is_address(settings.checkpoint_path):
        files = _fetch_checkpoint(settings, report)
    else:
        folder = newest_checkpoint(Path(settings.checkpoint_path))
        files = ModelFiles(_name(folder.resolve().parts), folder, find_config(folder))
    config_file = Path(settings.model_config) if settings.model_config else files.config_file
    shown = without_credentials(settings.checkpoint_path)
    if config_file is None:
        where = f"no {CONFIG_FILE} in the checkpoint or the two folders above it"
        raise StartupError(f"{shown}: {where}; give the run's config with --model-config")
    if not config_file.is_file():
        raise StartupError(f"{shown}: --model-config {config_file} does not exist")
    report(f"checkpoint {files.path}, config {config_file}")
    found = ModelFiles(files.name, files.path, config_file, lease=files.lease)
    if not with_tokenizer:
        return found
    tokenizer, lease = _find_tokenizer(config_file, files.path, settings, report)
    return replace(found, tokenizer=tokenizer, tokenizer_lease=lease)


def _find_tokenizer(
    config_file: Path, folder: Path, settings: Settings, report: Report
) -> tuple[Path, Lease | None]:
    """The tokenizer that the run's config names by a path, an address or a name on the Hub."""
    name = read_tokenizer_name(config_file)
    if name is None:
        if (folder / "tokenizer.json").is_file():
            return folder, None
        raise StartupError(f"{config_file} names no tokenizer; give one with --tokenizer")
    beside = config_file.parent / name
    if not is_address(name) and beside.is_dir():
        return beside, None
    try:
        found, lease = find_tokenizer(name, settings, report)
    except StartupError as error:
        problem = f"cannot get tokenizer = {name!r}: {error}"
        raise StartupError(f"{config_file}: {problem}; give one with --tokenizer") from error
    if not found.exists():
        raise StartupError(f"{config_file}: tokenizer = {name!r} does not exist; give one with --tokenizer")
    return found, lease


def _fetch_checkpoint(settings: Settings, report: Report) -> ModelFiles:
    store = _newest_store(Store(settings.checkpoint_path))
    names = [name for name in store.list_files() if NEEDED.fullmatch(name)]
    files = store.describe_all(names)
    if not settings.model_config and CONFIG_FILE not in names:
        config = _config_above(store)
        if config is not None:
            files.append(config)
    lease = fetch_files(store, files, settings.cache_path, limit_bytes=settings.cache_size, report=report)
    config_file = lease.path / CONFIG_FILE
    name = _name(store.address.partition("://")[2].split("/"))
    return ModelFiles(name, lease.path, config_file if config_file.is_file() else None, lease=lease)


def _newest_store(store: Store) -> Store:
    """The checkpoint at the address, or the complete one with the highest step directly below it."""
    if store.read(METADATA_FILE) is not None:
        return store
    steps: dict[str, int] = {}
    for name in store.list_folders():
        step = step_of(store.read(f"{name}/{METADATA_FILE}") or b"")
        if step is not None:
            steps[name] = step
    if not steps:
        expected = f"expected {METADATA_FILE} in it or in one of its folders"
        raise StartupError(f"{store.shown} holds no complete Levanter checkpoint: {expected}")
    newest = max(steps, key=lambda name: (steps[name], name))
    return Store(f"{store.address}/{newest}")


def _config_above(store: Store) -> RemoteFile | None:
    """The config.yaml one or two folders up, which the cache keeps in the checkpoint's own folder."""
    address = store.address
    for _ in range(2):
        address = address.rpartition("/")[0]
        if not is_address(address):
            return None
        found = Store(address).describe(CONFIG_FILE)
        if found is not None:
            return found
    return None


def _name(parts: Sequence[str]) -> str:
    """The run's name: that of the folder, or of the folder above if it is a step's."""
    *above, last = parts
    return PurePosixPath(above[-1]).name if STEP.fullmatch(last) and above else last
