"""The tensors of one quantized layer, and the protocol of readers of quantized formats."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.weights.quantized.packed_tensor import PackedTensor, Rows, unpack_nibbles
from levserve.weights.stored_tensor import Slice

SCALE_TYPES = {
    "F32": jnp.dtype(jnp.float32),
    "BF16": jnp.dtype(jnp.bfloat16),
    "F16": jnp.dtype(jnp.float16),
}


@dataclass(frozen=True, slots=True)
class Module:
    """A layer's tensors by the last words of their names; `name` is the layer's own, for errors."""

    name: str
    tensors: Mapping[str, Slice]

    def take(self, word: str, *dtypes: str) -> Slice:
        """The tensor of this name; refuses one that is missing or of another type."""
        if word not in self.tensors:
            raise StartupError(f"{self.name} is quantized but has no tensor {word}")
        dtype = self.tensors[word].get_dtype()
        if dtype not in dtypes:
            expected = " or ".join(dtypes)
            raise StartupError(f"{self.name}.{word} is stored as {dtype}, expected {expected}")
        return self.tensors[word]

    def check_shape(self, word: str, *expected: int) -> None:
        shape = self.tensors[word].get_shape()
        if tuple(shape) != expected:
            raise StartupError(f"{self.name}.{word} is {shape}, expected {list(expected)}")

    def is_in_order(self, word: str, num_inputs: int, group: int) -> bool:
        """Whether each group is a run of neighbouring inputs. `word` names the tensor of groups, if any."""
        if word not in self.tensors:
            return True
        return np.array_equal(self.tensors[word][:], np.arange(num_inputs) // group)

    def read_groups(self, word: str, num_inputs: int, num_groups: int) -> NDArray[np.int64]:
        """The group of each input."""
        self.check_shape(word, num_inputs)
        groups = np.asarray(self.take(word, "I32", "I64")[:], np.int64)
        if groups.min() < 0 or groups.max() >= num_groups:
            raise StartupError(f"{self.name}.{word} is corrupt: some groups are not among {num_groups}")
        return groups

    def refuse_order(self, word: str, num_inputs: int, group: int) -> None:
        """Refuses a layer whose inputs are not in the order of their groups."""
        if not self.is_in_order(word, num_inputs, group):
            raise StartupError(
                f"{self.name} has its inputs reordered by activation (act-order, desc_act), "
                "which is not supported"
            )


class Method(Protocol):
    """Reads one quantized format: recognises a quantized layer by its tensors, and opens its matrix."""

    @property
    def words(self) -> Collection[str]:
        """The last words of the names of a quantized layer's tensors; the layer may have others, such as a
        bias."""

    def is_quantized(self, words: Collection[str]) -> bool:
        """Whether a layer with such tensors is quantized."""

    def open(self, module: Module) -> PackedTensor: ...


def cut_across(
    stored: Slice, start: int, stop: int, order: NDArray[np.int64] | None = None, added: int = 0
) -> NDArray[np.uint8]:
    """Rows `start` to `stop` of codes that are stored [in, out / 8], eight outputs in an int32.

    `added` is first added to every int32, modulo 2**32.
    """
    first = start // 8
    words = np.ascontiguousarray(stored[:, first : -(-stop // 8)]).view(np.uint32)
    codes = unpack_nibbles(words + np.uint32(added))
    codes = codes if order is None else codes[..., order]
    flat = codes.reshape(len(codes), -1)
    return np.ascontiguousarray(flat[:, start - 8 * first : stop - 8 * first].T)


def across_rows(stored: Slice) -> Rows:
    """A tensor that is stored [group, out], read as [out, group]."""
    num_groups, num_rows = stored.get_shape()
    return Rows((num_rows, num_groups), lambda start, stop: stored[:, start:stop].T)


def block_rows(stored: Slice, shape: tuple[int, int], rows: int) -> Rows:
    """A tensor that is stored [row block, group], read with one row for each row of the matrix."""

    def read(start: int, stop: int) -> NDArray[np.generic]:
        first = start // rows
        blocks = stored[first : -(-stop // rows)]
        return np.repeat(blocks, rows, axis=0)[start - first * rows : stop - first * rows]

    return Rows(shape, read)
