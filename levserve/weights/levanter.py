"""Reads the model out of a checkpoint that Levanter's trainer saved, through tensorstore and without an export.

Two layouts: all arrays in one OCDBT store (manifest.ocdbt), and the older one with a zarr folder for each array. The arrays
lie at their path in the trainer's state, `model/transformer/layers/stacked/self_attn/q_proj/weight`, the layers stacked on
the first axis and heads on axes of their own. Here each layer becomes a tensor under its Hugging Face name. Nothing outside
`model` is read: the optimizer state next to it is twice as large.

A chunk of a stored array may span all layers, so a stack is read once, when the first of its layers is wanted, and let go
after the last. The loader asks for layers kind by kind (see `load.load_order`), which keeps two or three stacks in memory.
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
from levserve.weights.stored import StoredTensor

MANIFEST_FILE = "manifest.json"
MAX_FORMAT = 1  # of manifest.json
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
SPLIT_INPUT = re.compile(
    r".*\.(o_proj|c_attn)\.weight"
)  # [embed, head ...]; the other matrices have their heads on the left
TRANSPOSED = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")  # GPT-2 keeps its matrices [in, out]


class Checkpoint:
    """One checkpoint on disk, opened: the arrays of the model by path, with their shapes; no data has been read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _check_manifest(folder)
        self._is_database = (folder / DATABASE_FILE).is_file()
        with _told(folder, "its list of arrays"):
            files = self._metadata_files()
        prefix = f"{MODEL}/" if any(file.startswith(f"{MODEL}/") for file in files) else ""
        self._arrays: dict[str, Any] = {}
        for file in files:
            path, _, name = file.rpartition("/")
            if path.startswith(prefix) and name in ZARR_FILES:
                array = self._open(path, ZARR_FILES[name])
                if array.dtype.name != "bool":  # switches of dropout and the like
                    self._arrays[path.removeprefix(prefix)] = array
        if not any(path.startswith("embeddings/") for path in self._arrays):
            raise StartupError(f"{folder} holds no language model: no array under {prefix}embeddings")
        self._is_gpt2 = "embeddings/position_embeddings/weight" in self._arrays

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The arrays as Levanter shapes them, one layer each, by Hugging Face name."""
        return {name: shape for path in self._arrays for name, shape, _ in self._layers(path)}

    def read_tensors(self, dtype: np.dtype[np.generic]) -> Iterator[tuple[str, StoredTensor]]:
        """Every tensor of the model. Matrices come in `dtype`, so that a stack is not held wider than it will be served."""
        for path, array in self._arrays.items():
            if array.dtype.name not in DTYPES:
                raise StartupError(
                    f"{self.folder}: {path} is stored as {array.dtype.name}; supported are {', '.join(DTYPES)}"
                )
            stack = Stack(f"{self.folder}: {path}", array, dtype, is_stacked="/stacked/" in path)
            for name, shape, index in self._layers(path):
                yield (
                    name,
                    LevanterTensor(
                        stack, index, fold(name, shape), is_transposed=TRANSPOSED.fullmatch(name) is not None
                    ),
                )

    def _layers(self, path: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """The tensors in one array: name, shape, and the index in a stack."""
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
        """Where an array's own description lies, for every array of the checkpoint."""
        if self._is_database:
            return [key.decode() for key in ts.KvStore.open(self._database("")).result().list().result()]
        root = self.folder / MODEL
        return sorted(str(path.relative_to(self.folder)) for name in ZARR_FILES for path in root.rglob(name))

    def _database(self, path: str) -> dict[str, object]:
        return {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{self.folder.resolve()}/"},
            "path": path,
        }

    def _open(self, path: str, driver: str) -> Any:
        kvstore = (
            self._database(f"{path}/")
            if self._is_database
            else {"driver": "file", "path": f"{self.folder.resolve() / path}/"}
        )
        with _told(self.folder, path):
            array = ts.open({"driver": driver, "kvstore": kvstore}, read=True, open=True).result()
            is_matrix = array.ndim - ("/stacked/" in path) >= 2
            if not is_matrix:
                return array
            # Chunks of nothing but zeros are not stored: right for a bias that never moved, a lost file in a matrix.
            return ts.open(
                {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}, read=True, open=True
            ).result()


class Stack:
    """A stored array, read whole when first asked for and dropped when every row has been handed out. Shared by threads."""

    def __init__(self, source: str, array: Any, dtype: np.dtype[np.generic], *, is_stacked: bool) -> None:
        self._source = source
        is_matrix = array.ndim - is_stacked >= 2
        narrows = is_matrix and dtype == ml_dtypes.bfloat16
        self._array = (
            ts.cast(array, ts.bfloat16 if narrows else ts.float32)
            if array.dtype.name != dtype.name
            else array
        )
        self._is_stacked = is_stacked
        self._num_left = array.size
        self._lock = threading.Lock()
        self._data: NDArray[np.generic] | None = None

    def take(
        self, index: int, shape: tuple[int, ...], part: slice | tuple[slice, slice]
    ) -> NDArray[np.generic]:
        with self._lock:
            if self._data is None:
                with _told(self._source, "its data"):
                    self._data = self._array.read().result()
            assert self._data is not None
            layer = self._data[index] if self._is_stacked else self._data
            taken = layer.reshape(shape)[part]
            self._num_left -= taken.size
            if self._num_left <= 0:
                self._data = None
            return taken


class LevanterTensor:
    """One layer of a stack, in Hugging Face's shape and with its rows first."""

    def __init__(self, stack: Stack, index: int, shape: tuple[int, ...], *, is_transposed: bool) -> None:
        self._stack = stack
        self._index = index
        self._stored_shape = shape
        self._is_transposed = is_transposed
        self.shape = shape[::-1] if is_transposed else shape

    def read(self, start: int, stop: int) -> NDArray[np.generic]:
        part = (slice(None), slice(start, stop)) if self._is_transposed else slice(start, stop)
        rows = self._stack.take(self._index, self._stored_shape, part)
        return rows.T if self._is_transposed else rows


def fold(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with heads made one axis: [kv_head, group, head, embed] becomes [out, in]."""
    if VECTOR.fullmatch(name):
        return (math.prod(shape),)
    return (
        (shape[0], math.prod(shape[1:]))
        if SPLIT_INPUT.fullmatch(name)
        else (math.prod(shape[:-1]), shape[-1])
    )


def _check_manifest(folder: Path) -> None:
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
        version, driver = manifest["format_version"], manifest["array_driver"]
    except FileNotFoundError:
        return  # written before there were manifests
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"cannot read {folder / MANIFEST_FILE}: expected format_version and array_driver"
        ) from error
    if version != MAX_FORMAT or driver not in ZARR_FILES.values():
        raise StartupError(
            f"{folder / MANIFEST_FILE}: format {version} with {driver} arrays; supported is format {MAX_FORMAT} with zarr3"
        )


@contextmanager
def _told(source: object, what: str) -> Iterator[None]:
    """Turns what tensorstore raises into one line that names the checkpoint and the array."""
    try:
        yield
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise StartupError(f"{source}: {what} cannot be read: {reason[:300]}") from error
