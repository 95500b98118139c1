"""Reads DeepSeek's attention (MLA) from GGUF files.

llama.cpp leaves the rows of queries and keys in DeepSeek's order (see `row_order.py`). It stores the matrix
that expands keys and values in two parts, that of keys transposed; early files have it whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from levserve.gguf.header import shortest
from levserve.model.config import Latent, ModelConfig, Scoring, YarnScaling
from levserve.weights.config_fields import Extras, Fields
from levserve.weights.gguf_mixtures import DEEPSEEK, SIGMOID, SOFTMAX, UNSET, read_deepseek_experts
from levserve.weights.rope_scaling import yarn_attention_factor
from levserve.weights.row_order import ReorderedTensor, row_order
from levserve.weights.stored_tensor import ALL, StoredTensor

LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
KEYS = (
    *DEEPSEEK,
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "attention.value_length_mla",
    LOG_MULTIPLIER,
)
PART = re.compile(r"(blk\.\d+\.attn_)([kv])_b\.weight")


def head_size(fields: Fields) -> int:
    """The size of a head's queries and keys. Newer files have another number under the key of early ones."""
    return fields.integer("attention.key_length_mla", fields.integer("attention.key_length"))


def read_deepseek(fields: Fields) -> Extras:
    fields.require({"expert_gating_func": (UNSET, SOFTMAX, SIGMOID, None)})
    has_sigmoid = fields.get("expert_gating_func") == SIGMOID
    size, num_heads = head_size(fields), fields.integer("attention.head_count")
    value_size = fields.integer("attention.value_length_mla", fields.integer("attention.value_length"))
    if value_size > size:
        raise fields.refused("attention.value_length_mla")
    rotary_size = fields.integer("rope.dimension_count")
    query_rank = fields.integer("attention.q_lora_rank", 0, minimum=0) or None
    latent = Latent(fields.integer("attention.kv_lora_rank"), query_rank, rotary_size, value_size)
    return {
        **read_deepseek_experts(fields, Scoring.SIGMOID if has_sigmoid else Scoring.SOFTMAX),
        **_read_yarn(fields, size),
        "num_kv_heads": num_heads,
        "rotary_size": rotary_size,
        "latent": latent,
    }


def _read_yarn(fields: Fields, size: int) -> Extras:
    """YaRN scales the scores here, and not the rotary positions."""
    if fields.get("rope.scaling.type") != "yarn":
        return {"attention_scale": size**-0.5}
    fields.require({"rope.scaling.attn_factor": (1.0, None)})
    factor = shortest(fields.number("rope.scaling.factor"))
    scale = round(10 * fields.number(LOG_MULTIPLIER), 6) if fields.get(LOG_MULTIPLIER) else 0.0
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    slow, fast = (
        shortest(fields.number(f"rope.scaling.yarn_beta_{kind}", default))
        for kind, default in (("slow", 1.0), ("fast", 32.0))
    )
    return {
        "attention_scale": size**-0.5 * yarn_attention_factor(factor, scale) ** 2,
        "rope_scaling": YarnScaling(factor, original, 1.0, beta_fast=fast, beta_slow=slow),
    }


class ExpandingTensor:
    """The matrix [out, rank], from its two parts: the rows of each head's key, then those of its value."""

    def __init__(self, keys: StoredTensor, values: StoredTensor) -> None:
        self._keys, self._values = keys, values
        num_heads, rank, key_size = keys.shape
        self._size = key_size + values.shape[1]
        self.shape = (num_heads * self._size, rank)

    def read(self, start: int, stop: int, columns: slice = ALL) -> NDArray[np.generic]:
        first, last = start // self._size, -(-stop // self._size)
        keys = self._keys.read(first, last).astype(np.float32).swapaxes(1, 2)
        values = self._values.read(first, last).astype(np.float32)
        rows = np.concatenate([keys, values], axis=1).reshape(-1, self.shape[1])
        return rows[start - first * self._size : stop - first * self._size, columns]

    def finish(self) -> None:
        self._keys.finish()
        self._values.finish()


def arrange_latent(
    tensors: Iterable[tuple[str, StoredTensor]], config: ModelConfig
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors with rows in levserve's order and both parts joined; those of other models as they are."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors:
        found = PART.fullmatch(name) if config.latent else None
        if found is not None and len(tensor.shape) == 3:
            layer = parts.setdefault(found[1], {})
            layer[found[2]] = tensor
            if len(layer) == 2:
                yield f"{found[1]}kv_b.weight", ExpandingTensor(layer["k"], layer["v"])
            continue
        order = row_order(name, config)
        yield name, tensor if order is None else ReorderedTensor(tensor, order)
