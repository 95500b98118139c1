"""Experts in four-bit values are read as the values that the codes stand for."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.weights.gpt_oss_tensors import unpack_experts

NAME = "model.layers.0.mlp.experts.down_proj"


class Stored:
    def __init__(self, array: NDArray[np.generic]) -> None:
        self._array = array

    def get_shape(self) -> list[int]:
        return list(self._array.shape)

    def get_dtype(self) -> str:
        return {"uint8": "U8"}.get(self._array.dtype.name, self._array.dtype.name)

    def __getitem__(self, part: slice | tuple[slice, ...]) -> NDArray[np.generic]:
        return self._array[part]


def test_every_code_is_a_number_the_lower_half_of_a_byte_first() -> None:
    blocks = np.array([low | (low + 8 & 15) << 4 for low in range(16)], np.uint8)
    scales = np.array([[[127]], [[120]], [[130]]], np.uint8)
    packed = {
        f"{NAME}_scales": Stored(scales),
        f"{NAME}_blocks": Stored(np.broadcast_to(blocks, (3, 1, 1, 16))),
    }
    ((name, tensor),) = unpack_experts("folder", packed)
    assert (name, tensor.shape) == (NAME, (3, 1, 32))
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = [*sizes, *(-size for size in sizes)]
    wanted = np.array([number for code in range(16) for number in (numbers[code], numbers[code - 8])])
    for expert, factor in enumerate((1.0, 2.0**-7, 8.0)):
        assert tensor.read(expert, expert + 1).tolist() == [[(wanted * factor).tolist()]]


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (np.zeros((3, 4, 2, 16), np.uint8), None, "_scales is missing"),
        (None, np.zeros((3, 4, 2), np.uint8), "_blocks is missing"),
        (np.zeros((3, 4, 2, 16), np.int32), np.zeros((3, 4, 2), np.uint8), "stored as int32"),
        (np.zeros((3, 4, 2, 8), np.uint8), np.zeros((3, 4, 2), np.uint8), "blocks"),
        (np.zeros((3, 4, 2, 16), np.uint8), np.zeros((3, 4, 1), np.uint8), "blocks"),
    ],
)
def test_halves_of_a_matrix_that_do_not_fit_are_refused(
    blocks: NDArray[np.generic] | None, scales: NDArray[np.generic] | None, message: str
) -> None:
    parts = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}
    packed = {name: Stored(array) for name, array in parts.items() if array is not None}
    with pytest.raises(StartupError, match=message):
        list(unpack_experts("folder", packed))
