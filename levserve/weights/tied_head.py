"""A head that lies beside the embedding to which the configuration ties it."""

from __future__ import annotations

import logging

import numpy as np

from levserve.weights.hf_tensors import HfTensor
from levserve.weights.stored_tensor import StoredTensor

log = logging.getLogger(__name__)

HEAD = "lm_head.weight"
NUM_ROWS = 16
"""Rows that are compared with the embedding's: another head differs in all of them."""


def compare_head(source: str, head: StoredTensor | None, embed: StoredTensor) -> None:
    """Warns of a head that is not the embedding; compares some rows.

    transformers uses such a head since version 5, and left it out before. A quantized one may be the
    embedding, rounded.
    """
    if not isinstance(head, HfTensor):
        return
    starts = range(0, embed.shape[0], -(-embed.shape[0] // NUM_ROWS)) if head.shape == embed.shape else ()
    own, tied = (
        [np.asarray(part.read(row, row + 1), np.float32) for row in starts] for part in (head, embed)
    )
    if not own or not np.allclose(own, tied, rtol=0.01, atol=1e-4):
        log.warning(
            "%s: %s is not used, because tie_word_embeddings = true takes the embedding in its place, and "
            "they differ; if it is meant to be used, set tie_word_embeddings to false in config.json",
            source,
            HEAD,
        )
