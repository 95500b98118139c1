"""What every checkpoint reader provides: tensors that are still in their file.

Names and shapes are known before any weights are read, so a checkpoint that does not fit is refused at once.
Rows are decoded in blocks, straight into the array that serves, so there is never a float32 copy of a whole
model.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ALL = slice(None)


class Slice(Protocol):
    """What we use of safetensors' lazy tensor, which keeps the file mapped after it is closed."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, part: slice | tuple[slice, ...]) -> NDArray[np.generic]: ...


class StoredTensor(Protocol):
    """A tensor in Hugging Face's row order, `[out, in]` or `[out]`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int, columns: slice = ALL) -> NDArray[np.generic]:
        """Rows `start` to `stop`, decoded to float32 or bfloat16. Safe to call from several threads.

        Of a matrix only these `columns`, of which both ends are given or neither. Where the format allows,
        the others are not read.
        """
        ...

    def finish(self) -> None:
        """Called when nothing more of it will be read."""
