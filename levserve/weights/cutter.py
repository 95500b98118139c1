"""Decides which rows and columns of a checkpoint's tensors go where, if several devices share a model.

Each process reads the shares of its own devices and nothing else, where the file's format allows that.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from levserve.model.config import ModelConfig
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.sharding import Shards, Share, find_cut, local_config, share_of, stacked_shape
from levserve.weights.fill import Copy, Source


class Cutter:
    """Cuts a model's arrays for these shards; `config` is the whole model's."""

    def __init__(self, config: ModelConfig, shards: Shards) -> None:
        self._config = config
        self._shards = shards
        self._local = parameter_shapes(local_config(config, shards.count))

    @property
    def host_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape in which each array is filled: this process's shares stacked, or all of the array."""
        return {name: stacked_shape(shape, self.num_shares(name)) for name, shape in self._local.items()}

    def num_shares(self, name: str) -> int:
        """How many shares of an array are stacked."""
        return len(self._shards.here) if self._is_cut(name) else 1

    def has_gaps(self, name: str) -> bool:
        """Whether some rows are filled by no tensor."""
        is_by_words = name in ("embed", "head", "head_bias")
        return is_by_words and self._config.vocab_size % self._shards.count > 0

    def copies(
        self, name: str, host: NDArray[np.generic], source: Source, columns_each: int = 1
    ) -> Iterator[Copy]:
        """The copies from a tensor to an array that has the shape of `host_shapes`.

        If the array has a quantized matrix's scales, each column stands for `columns_each` of the matrix.
        """
        if not self._is_cut(name):
            yield Copy(_rows_of(source), (), host[source.target.index])
            return
        size = self._local[name][0]
        for number, index in enumerate(self._shards.here):
            into = host[number * size : (number + 1) * size]
            share = share_of(name, host.ndim, self._config, self._shards.count, index)
            assert share is not None
            if share.axis < len(source.target.index):
                yield from _cut_rows(share, into, source)
            else:
                yield _cut_columns(share, into, source, columns_each)

    def _is_cut(self, name: str) -> bool:
        return self._shards.count > 1 and find_cut(name, self._config) is not None


def _cut_columns(share: Share, into: NDArray[np.generic], source: Source, columns_each: int) -> Copy:
    """Copies the columns of a share; a tensor has all columns of its rows."""
    (columns,) = share.ranges
    inner = (slice(None),) * (len(source.tensor.shape) - 2)
    if into.shape[-1] == source.tensor.shape[-1]:  # scales of whole rows go to every device
        return Copy(_rows_of(source), (), into[source.target.index])
    wanted = range(columns.start // columns_each, columns.stop // columns_each)
    return Copy(_rows_of(source), (*inner, _slice(wanted)), into[source.target.index])


def _cut_rows(share: Share, into: NDArray[np.generic], source: Source) -> Iterator[Copy]:
    """Copies those rows of a share that this tensor has."""
    *outer, filled = source.target.index
    assert isinstance(filled, slice)
    has_all_experts = bool(outer) and isinstance(outer[0], slice)
    place = 0
    for wanted in share.ranges:
        found = range(max(wanted.start, filled.start), min(wanted.stop, filled.stop))
        if found:
            first = place + found.start - wanted.start
            target = into[(*outer, slice(first, first + len(found)))]
            rows = range(found.start - filled.start, found.stop - filled.start)
            if has_all_experts:  # then the tensor's first axis is that of experts
                yield Copy(_rows_of(source), (_slice(rows),), target)
            else:
                yield Copy(rows, (), target)
        place += len(wanted)


def _rows_of(source: Source) -> range:
    return range(source.tensor.shape[0])


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
