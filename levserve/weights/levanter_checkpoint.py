"""Reads the model from a checkpoint of Levanter's trainer, through tensorstore and without an export.

There are two layouts: all arrays in one OCDBT database (manifest.ocdbt), and an older one with a zarr folder
for each array. An array is named after its path in the trainer's state, such as
`model/transformer/layers/stacked/self_attn/q_proj/weight`; layers are stacked on the first axis, and heads
have separate axes. Here each layer becomes a tensor with its Hugging Face name. Only `model` is read: the
optimizer's state next to it is twice as large.

A chunk of a stored array may span all layers, so a stack is read as a whole when its first layer is needed,
and freed after the last. `checkpoint.load_order` asks for one kind of tensor after another, so that two or
three stacks are in memory at a time.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.weights.levanter_folder import DATABASE_FILE, MODEL
from levserve.weights.stored_tensor import ALL, StoredTensor
from levserve.weights.tensor_names import TRANSPOSED

MANIFEST_FILE = "manifest.json"
FORMAT = 1  # of manifest.json
ZARR_FILES = {"zarr.json": "zarr3", ".zarray": "zarr"}
DTYPES = ("float32", "float16", "bfloat16")
LAYER = re.compile(r"(?P<stem>.*/)?(?:layers|blocks)/(?:stacked|blocks/(?P<index>\d+))/(?P<rest>.+)")
OTHER_NAMES = {
    "embeddings/token_embeddings/weight": "model.embed_tokens.weight",
    "transformer/norm/weight": "model.norm.weight",
    "lm_head/weight": "lm_head.weight",
}
GPT2_NAMES = {
    "embeddings/token_embeddings/weight": "wte.weight",
    "embeddings/position_embeddings/weight": "wpe.weight",
    "transformer/ln_f/weight": "ln_f.weight",
    "transformer/ln_f/bias": "ln_f.bias",
}
VECTOR = re.compile(r".*(bias|norm\.weight|ln_\w\.weight)")
EXPERTS = re.compile(r".*\.experts\.w[123]\.weight")  # [expert, in, out]
SPLIT_INPUT = re.compile(r".*\.(o_proj|c_attn)\.weight")  # [embed, head ...]; others have the heads first


class Checkpoint:
    """One open checkpoint on disk. It knows the model's arrays and their shapes; no data has been read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _check_manifest(folder)
        self._is_database = (folder / DATABASE_FILE).is_file()
        with _as_startup_error(folder, "its list of arrays"):
            files = self._metadata_files()
        prefix = f"{MODEL}/" if any(file.startswith(f"{MODEL}/") for file in files) else ""
        self._arrays: dict[str, Any] = {}
        for file in files:
            path, _, name = file.rpartition("/")
            if path.startswith(prefix) and name in ZARR_FILES:
                array = self._open(path, ZARR_FILES[name])
                if array.dtype.name != "bool":  # flags such as dropout's
                    self._arrays[path.removeprefix(prefix)] = array
        if not any(path.startswith("embeddings/") for path in self._arrays):
            raise StartupError(f"{folder} holds no language model: no array under {prefix}embeddings")
        self._is_gpt2 = "embeddings/position_embeddings/weight" in self._arrays

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Levanter's shape of each tensor, by its Hugging Face name."""
        return {name: shape for path in self._arrays for name, shape, _ in self._layers(path)}

    def read_tensors(self, dtype: np.dtype[np.generic]) -> Iterator[tuple[str, StoredTensor]]:
        """Every tensor of the model; matrices are read in `dtype`, so that a stack takes little memory."""
        for path, array in self._arrays.items():
            stored = array.dtype.name
            if stored not in DTYPES:
                supported = ", ".join(DTYPES)
                raise StartupError(f"{self.folder}: {path} is stored as {stored}; supported are {supported}")
            stack = Stack(f"{self.folder}: {path}", array, dtype, is_stacked="/stacked/" in path)
            for name, shape, index in self._layers(path):
                is_transposed = bool(TRANSPOSED.fullmatch(name) or EXPERTS.fullmatch(name))
                yield name, LevanterTensor(stack, index, fold(name, shape), is_transposed=is_transposed)

    def _layers(self, path: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Name, shape and index in the stack of each tensor in one array."""
        shape = tuple(self._arrays[path].shape)
        found = LAYER.fullmatch(path)
        stem = "h" if self._is_gpt2 else "model.layers"
        if found is None:
            names = GPT2_NAMES if self._is_gpt2 else OTHER_NAMES
            yield names.get(path, path.replace("/", ".")), shape, 0
        elif found["index"] is not None:
            yield f"{stem}.{found['index']}.{found['rest'].replace('/', '.')}", shape, 0
        else:
            for index in range(shape[0]):
                yield f"{stem}.{index}.{found['rest'].replace('/', '.')}", shape[1:], index

    def _metadata_files(self) -> list[str]:
        """The paths of the files that describe an array, among others."""
        if self._is_database:
            keys = ts.KvStore.open(self._database("")).result().list().result()
            return [key.decode() for key in keys]
        root = self.folder / MODEL
        return sorted(str(path.relative_to(self.folder)) for name in ZARR_FILES for path in root.rglob(name))

    def _database(self, path: str) -> dict[str, object]:
        base = {"driver": "file", "path": f"{self.folder.resolve()}/"}
        return {"driver": "ocdbt", "base": base, "path": path}

    def _open(self, path: str, driver: str) -> Any:
        if self._is_database:
            kvstore = self._database(f"{path}/")
        else:
            kvstore = {"driver": "file", "path": f"{self.folder.resolve() / path}/"}
        spec = {"driver": driver, "kvstore": kvstore}
        with _as_startup_error(self.folder, path):
            array = ts.open(spec, read=True, open=True).result()
            is_matrix = array.ndim - ("/stacked/" in path) >= 2
            if not is_matrix:
                return array
            # zarr does not store chunks of zeros, which a bias may have; a matrix that lacks one is damaged.
            return ts.open(spec | {"fill_missing_data_reads": False}, read=True, open=True).result()


class Stack:
    """A stored array that is read at the first `take` and freed when all of its layers are finished.

    Several threads may use it.
    """

    def __init__(self, source: str, array: Any, dtype: np.dtype[np.generic], *, is_stacked: bool) -> None:
        self._source = source
        if array.dtype.name != dtype.name:
            is_matrix = array.ndim - is_stacked >= 2
            is_narrow = is_matrix and dtype == ml_dtypes.bfloat16
            array = ts.cast(array, ts.bfloat16 if is_narrow else ts.float32)
        self._array = array
        self._is_stacked = is_stacked
        self._num_left = array.shape[0] if is_stacked else 1
        self._lock = threading.Lock()
        self._data: NDArray[np.generic] | None = None

    def take(
        self, index: int, shape: tuple[int, ...], part: slice | tuple[slice, slice]
    ) -> NDArray[np.generic]:
        with self._lock:
            if self._data is None:
                with _as_startup_error(self._source, "its data"):
                    self._data = self._array.read().result()
            assert self._data is not None
            layer = self._data[index] if self._is_stacked else self._data
            return layer.reshape(shape)[part]

    def finish_layer(self) -> None:
        with self._lock:
            self._num_left -= 1
            if self._num_left <= 0:
                self._data = None


class LevanterTensor:
    """One layer of a stack, in Hugging Face's shape with the rows first, or with the experts before them."""

    def __init__(self, stack: Stack, index: int, shape: tuple[int, ...], *, is_transposed: bool) -> None:
        self._stack = stack
        self._index = index
        self._stored_shape = shape
        self._is_transposed = is_transposed
        self.shape = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape

    def read(self, start: int, stop: int, columns: slice = ALL) -> NDArray[np.generic]:
        has_columns_first = self._is_transposed and len(self.shape) == 2
        part = (slice(None), slice(start, stop)) if has_columns_first else slice(start, stop)
        rows = self._stack.take(self._index, self._stored_shape, part)
        rows = rows.swapaxes(-1, -2) if self._is_transposed else rows
        return rows if columns == ALL else rows[:, columns]

    def finish(self) -> None:
        self._stack.finish_layer()


def fold(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Merges the axes of heads: [kv_head, group, head, embed] becomes [out, in]."""
    if VECTOR.fullmatch(name):
        return (math.prod(shape),)
    if EXPERTS.fullmatch(name):
        return shape
    if SPLIT_INPUT.fullmatch(name):
        return shape[0], math.prod(shape[1:])
    return math.prod(shape[:-1]), shape[-1]


def _check_manifest(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_bytes())
        version, driver = manifest["format_version"], manifest["array_driver"]
    except FileNotFoundError:
        return  # written before there were manifests
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"cannot read {path}: expected format_version and array_driver") from error
    if version != FORMAT or driver not in ZARR_FILES.values():
        supported = f"supported is format {FORMAT} with zarr3"
        raise StartupError(f"{path}: format {version} with {driver} arrays; {supported}")


@contextmanager
def _as_startup_error(source: object, what: str) -> Iterator[None]:
    """Turns an error of tensorstore into one line that names the checkpoint and the array."""
    try:
        yield
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise StartupError(f"{source}: cannot read {what}: {reason[:300]}") from error
