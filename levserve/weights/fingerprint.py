"""A short digest of a model's files, to tell whether two machines have the same model.

Reading a large model twice would double the start-up time, so the digest covers only the name, the size and
the first and last `PART_BYTES` of each file. A safetensors or GGUF file begins with the names, types and
shapes of all tensors and ends with weights, which differ between two steps of a training run.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from levserve.errors import StartupError
from levserve.gguf.parts import part_names
from levserve.weights.adapter_folder import CONFIG_FILE, weight_file
from levserve.weights.hub import has_weights
from levserve.weights.model_files import ModelFiles

PART_BYTES = 1 << 20
CHECKPOINT_FILES = ("metadata.json", "manifest.ocdbt")
"""Files of a Levanter checkpoint; its database's manifest changes whenever anything in the database does."""


def fingerprint(files: ModelFiles) -> str:
    """The digest, which leaves out tokenizers. Raises `StartupError` for files that cannot be read."""
    digest = hashlib.sha256()
    try:
        for name, file in sorted(_model_files(files).items()):
            size = file.stat().st_size
            digest.update(f"{name}\0{size}\0".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(PART_BYTES))
                if size > PART_BYTES:
                    stream.seek(-PART_BYTES, 2)
                    digest.update(stream.read(PART_BYTES))
    except OSError as error:
        raise StartupError(f"cannot read {error.filename}: {error.strerror}") from None
    return digest.hexdigest()[:16]


def list_states(files: ModelFiles) -> list[tuple[str, int, int]]:
    """Path, size and modification time of each file that the fingerprint covers."""
    found = sorted(_model_files(files).values())
    states = ((str(file.resolve()), file.stat()) for file in found)
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def _model_files(files: ModelFiles) -> dict[str, Path]:
    """The files with weights and architecture, by names that are the same on every machine."""
    if files.adapter is None:
        return _base_files(files)
    config, weights = files.adapter / CONFIG_FILE, weight_file(files.adapter)
    return _base_files(files) | {CONFIG_FILE: config, weights.name: weights}


def _base_files(files: ModelFiles) -> dict[str, Path]:
    path = files.path
    if path.is_file():  # numbered, because people rename such files
        parts = [path.with_name(name) for name in part_names(path.name)]
        return {str(number or ""): part for number, part in enumerate(parts)}
    found = {} if files.config_file is None else {"config": files.config_file}
    for file in path.iterdir():
        is_model = file.name == "config.json" or has_weights([file.name]) or file.name in CHECKPOINT_FILES
        if is_model and file.is_file():
            found[file.name] = file
    for file in (path / "model").rglob("*"):  # a Levanter checkpoint of the older layout
        if file.is_file():
            found[file.relative_to(path).as_posix()] = file
    return found
