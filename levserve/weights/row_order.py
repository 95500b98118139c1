"""Puts the rows of attention matrices in the order that levserve computes with.

levserve has a head's rotated channels first, with the first channels of all pairs before the second ones.
Cohere and DeepSeek store the two channels of a pair as neighbours, and DeepSeek stores the rotated ones last.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from levserve.model.config import ModelConfig
from levserve.weights.gguf_tensors import interleaved_rows
from levserve.weights.stored_tensor import ALL, StoredTensor

INTERLEAVED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.(weight|bias)")
QUERIES = re.compile(
    r"model\.layers\.\d+\.self_attn\.(q_proj|q_b_proj)\.weight|blk\.\d+\.attn_(q|q_b)\.weight"
)
LATENT = re.compile(
    r"model\.layers\.\d+\.self_attn\.kv_a_proj_with_mqa\.weight|blk\.\d+\.attn_kv_a_mqa\.weight"
)


class ReorderedTensor:
    """A tensor with rows reordered within blocks; `order` gives the stored row for each row of a block."""

    def __init__(self, stored: StoredTensor, order: NDArray[np.int64]) -> None:
        self._stored = stored
        self._order = order
        self.shape = stored.shape

    def read(self, start: int, stop: int, columns: slice = ALL) -> NDArray[np.generic]:
        size = len(self._order)
        first, last = start // size * size, -(-stop // size) * size
        blocks, rows = np.divmod(np.arange(start, stop), size)
        return self._stored.read(first, last, columns)[blocks * size + self._order[rows] - first]

    def finish(self) -> None:
        self._stored.finish()


def row_order(name: str, config: ModelConfig) -> NDArray[np.int64] | None:
    """The order of a tensor's rows within their blocks; None if it stays as it is."""
    if config.has_interleaved_heads and INTERLEAVED.fullmatch(name):
        return interleaved_rows(np.arange(config.head_dim), config.head_dim)
    latent = config.latent
    if latent is None:
        return None
    pairs = np.arange(latent.rotary_size)
    if latent.has_interleaved_pairs:
        pairs = pairs.reshape(-1, 2).T.reshape(-1)
    if QUERIES.fullmatch(name):
        plain = config.head_dim - latent.rotary_size
        return np.concatenate([plain + pairs, np.arange(plain)])
    if LATENT.fullmatch(name):
        return np.concatenate([np.arange(latent.kv_rank), latent.kv_rank + pairs])
    return None
