"""How the hidden states of a text become its embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from levserve.generation import Choice

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

POOLINGS = ("mean", "last")


def make_vector(choice: Choice, pooling: str | None) -> npt.NDArray[np.float32]:
    """The pooled states (the mean by default), scaled to length 1; the request must have asked for them."""
    import numpy as np  # takes 0.1 s, which would delay the start

    assert choice.hidden is not None
    vector = np.array(choice.hidden.last if pooling == "last" else choice.hidden.mean, dtype="<f4")
    vector /= np.linalg.norm(vector) or 1.0
    return vector
