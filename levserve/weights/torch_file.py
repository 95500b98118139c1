"""Reads tensors that PyTorch saved (`.bin`, `.pt`), without PyTorch and without running the code in the file.

Such a file is a zip archive with the raw values of all tensors, and a pickle that says which values belong to
which tensor. A pickle is a program: it can name any function of any module and have it called. Here it can
name only what `ALLOWED` lists, and nothing in that list can import or change anything. Any other name is an
error before anything is called.

Files are mapped into memory, so rows are copied only when they are read.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError, cause_of
from levserve.gguf.pointer import describe_pointer

STORAGE_TYPES: Mapping[str, np.dtype[Any]] = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
ZIP_START = b"PK\3\4"
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled magic number that a file of PyTorch before 1.6 begins with."""
LOCAL_HEADER = struct.Struct("<26xHH")
"""A zip entry's own header: only the lengths of its name and of its extra field are of interest."""
MAX_PICKLE_BYTES = 256 << 20
MAX_DIMENSIONS = 8
PICKLE_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a damaged pickle raises."""


class TorchTensor(NamedTuple):
    """A tensor in a mapped file. The array is read-only."""

    array: NDArray[Any]


class Storage(NamedTuple):
    """The values of one or more tensors, as a flat array."""

    numbers: NDArray[Any]


def read_torch_file(path: Path) -> object:
    """What was saved, usually a mapping of names to tensors; each tensor is a `TorchTensor`."""
    try:
        with path.open("rb") as file:
            start = file.read(len(LEGACY_START))
        if not start.startswith(ZIP_START):
            raise StartupError(_not_a_zip(path, start))
        with zipfile.ZipFile(path) as archive:
            return _Archive(path, archive).load()
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise StartupError(f"cannot read {path}: {cause_of(error)}") from error
    except PICKLE_ERRORS as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StartupError(f"cannot read {path}: {reason}") from error


def read_state_dict(path: Path) -> dict[str, TorchTensor]:
    """The tensors of a file that holds nothing but named tensors, as a checkpoint's weights are saved."""
    saved = read_torch_file(path)
    if not isinstance(saved, dict):
        raise StartupError(f"{path} holds no named tensors, but one object of type {type(saved).__name__}")
    tensors: dict[str, TorchTensor] = {}
    for name, tensor in dict.items(saved):  # not saved.items(), which the file can set to something else
        if not isinstance(name, str) or not isinstance(tensor, TorchTensor):
            raise StartupError(f"{path}: {name!r:.100} is of type {type(tensor).__name__}, not a tensor")
        tensors[name] = tensor
    return tensors


def _not_a_zip(path: Path, start: bytes) -> str:
    if start == LEGACY_START:
        return (
            f"{path} is in the format of PyTorch before 1.6, which is not supported; "
            "save it again with a later version, or as safetensors"
        )
    return describe_pointer(path) or f"{path} is not a file that PyTorch saved: it is not a zip archive"


class _Archive:
    """The entries of an open file: one pickle, and the values of each storage by its key."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
        pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("it has no data.pkl, so PyTorch did not save it")
        self._root = pickles[0].removesuffix("data.pkl")
        self._storages: dict[tuple[str, str], Storage] = {}

    def load(self) -> object:
        byteorder = f"{self._root}byteorder"
        if byteorder in self._archive.namelist() and self._entry("byteorder").tobytes() != b"little":
            raise ValueError("its numbers are big-endian, which is not supported")
        pickled = self._entry("data.pkl")
        if len(pickled) > MAX_PICKLE_BYTES:
            raise ValueError(f"its data.pkl has {len(pickled):,} bytes, more than {MAX_PICKLE_BYTES:,}")
        return _Unpickler(io.BytesIO(pickled.tobytes()), self).load()

    def storage(self, kind: str, key: str, count: int) -> Storage:
        dtype = STORAGE_TYPES[kind]
        if (kind, key) not in self._storages:
            entry = self._entry(f"data/{key}")
            whole = entry[: len(entry) // dtype.itemsize * dtype.itemsize]
            self._storages[kind, key] = Storage(whole.view(dtype))
        storage = self._storages[kind, key]
        if count > len(storage.numbers):
            raise ValueError(f"it is cut short: storage {key} has fewer than {count:,} numbers")
        return storage

    def _entry(self, name: str) -> NDArray[np.uint8]:
        """The bytes of an entry, where they lie in the mapped file."""
        entry = self._archive.getinfo(f"{self._root}{name}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"its entry {name} is compressed or encrypted, which PyTorch never does")
        header = self._bytes[entry.header_offset : entry.header_offset + LOCAL_HEADER.size].tobytes()
        if len(header) < LOCAL_HEADER.size:
            raise ValueError(f"its entry {name} lies beyond the end of the file")
        start = entry.header_offset + LOCAL_HEADER.size + sum(LOCAL_HEADER.unpack(header))
        if start + entry.file_size > len(self._bytes):
            raise ValueError(f"its entry {name} lies beyond the end of the file")
        return self._bytes[start : start + entry.file_size]


class _Unpickler(pickle.Unpickler):
    """Runs a pickle that can name only what is in `ALLOWED`."""

    def __init__(self, file: io.BytesIO, archive: _Archive) -> None:
        super().__init__(file)
        self._archive = archive

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which is not part of a tensor; nothing was run"
            ) from None

    def persistent_load(self, pid: Any) -> Storage:
        what, kind, key, _, count = pid
        if what != "storage" or kind not in STORAGE_TYPES or not isinstance(key, str):
            raise ValueError(f"it has an unknown persistent id {pid!r:.100}")
        return self._archive.storage(kind, key, _size(count))


# A pickle can set attributes of the objects that it names. Ours have none to set: the functions are objects
# with empty `__slots__`, and storage types are plain strings.


class _RebuildTensor:
    """Stands for torch._utils._rebuild_tensor_v2."""

    __slots__ = ()

    def __call__(self, storage: object, offset: object, shape: object, strides: object, *_: object) -> object:
        if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
            raise TypeError("a tensor is described by wrong values")
        first, sizes, steps = _size(offset), list(map(_size, shape)), list(map(_size, strides))
        if len(sizes) != len(steps) or len(sizes) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {len(sizes)} dimensions and {len(steps)} strides")
        numbers = storage.numbers
        if 0 in sizes:
            return TorchTensor(numbers[:0].reshape(sizes))
        last = first + sum((size - 1) * step for size, step in zip(sizes, steps))
        if last >= len(numbers) or math.prod(sizes) > len(numbers):
            raise ValueError(f"a tensor of {sizes} lies beyond the end of its storage")
        in_bytes = [step * numbers.itemsize for step in steps]
        view = np.lib.stride_tricks.as_strided(numbers[first:], sizes, in_bytes, writeable=False)
        return TorchTensor(view)


class _RebuildParameter:
    """Stands for torch._utils._rebuild_parameter: only a parameter's tensor matters."""

    __slots__ = ()

    def __call__(self, tensor: object, *_: object) -> object:
        if not isinstance(tensor, TorchTensor):
            raise TypeError("a parameter is described by wrong values")
        return tensor


ALLOWED: Mapping[str, object] = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _RebuildTensor(),
    "torch._utils._rebuild_parameter": _RebuildParameter(),
    **{f"torch.{kind}": kind for kind in STORAGE_TYPES},
}
"""The names that a pickle may use, and the object that it gets for each."""


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.50} is not a size")
    return value
