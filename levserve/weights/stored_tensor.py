"""What every checkpoint reader provides: tensors that are still in their file.

Names and shapes are known before any weights are read, so a checkpoint that does not fit is refused at once.
Rows are decoded in blocks, straight into the array that serves, so there is never a float32 copy of a whole
model.
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
