"""What every checkpoint reader provides: tensors that are still in their file.

Names and shapes are known before any weights are read, so a checkpoint that does not fit is refused at once.
Rows are decoded in blocks, straight into the array that serves, so there is never a float32 copy of a whole
model.
"""

from __future__ import annotations

from typing import Protocol

import jax
import numpy as np
from numpy.typing import NDArray

ALL = slice(None)
DTYPE_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
}
"""The names of types in safetensors, by their names in NumPy."""


class Slice(Protocol):
    """What we use of safetensors' lazy tensor, which keeps the file mapped after it is closed."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, part: slice | tuple[slice, ...]) -> NDArray[np.generic]: ...


class ArraySlice:
    """An array in the form of safetensors' lazy tensors. A device's array is copied when it is first read."""

    def __init__(self, array: NDArray[np.generic] | jax.Array) -> None:
        self._array = array

    def get_shape(self) -> list[int]:
        return list(self._array.shape)

    def get_dtype(self) -> str:
        name = np.dtype(self._array.dtype).name
        return DTYPE_NAMES.get(name, name)

    def __getitem__(self, part: slice | tuple[slice, ...]) -> NDArray[np.generic]:
        if not isinstance(self._array, np.ndarray):
            self._array = np.asarray(self._array)  # if two threads race, both make the same copy
        return np.asarray(self._array[part])


class StoredTensor(Protocol):
    """A tensor in Hugging Face's row order, `[out, in]` or `[out]`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int, columns: slice = ALL) -> NDArray[np.generic]:
        """Rows `start` to `stop`, decoded to float32 or bfloat16. Safe to call from several threads.

        Of a matrix, only these `columns` are returned; the slice has both ends or neither. Where the format
        allows, the other columns are not read from the file.
        """
        ...

    def finish(self) -> None:
        """Called when no more of the tensor will be read."""
