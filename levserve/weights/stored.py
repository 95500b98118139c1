"""What every checkpoint reader gives: tensors that are still in their file.

Names and shapes are known before a byte of the weights is read, so a checkpoint that does not fit is refused at once; the
rows are decoded in pieces, straight into the array that serves, so no float32 copy of a model ever exists.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class StoredTensor(Protocol):
    """A tensor in Hugging Face's row order, `[out, in]` or `[out]`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int) -> NDArray[np.generic]:
        """Rows `start` to `stop`, decoded to float32 or bfloat16. Safe to call from several threads."""
        ...
