"""Turns the metadata of a GGUF file into a `ModelConfig`, or says by name and value what levserve cannot serve.

Every key of the architecture is known here or refused: llama.cpp stores only what changes the forward pass there.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.model.config import Llama3Scaling, ModelConfig
from levserve.weights.fields import Fields
from levserve.gguf_header import GGUFHeader, read_header
from levserve.weights.names import ROPE_FACTORS

LLAMA, QWEN2, QWEN3 = ARCHITECTURES = ("llama", "qwen2", "qwen3")  # a Mistral is a llama here

# Keys that would change the forward pass, each with the values that leave it as we compute it.
SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
}
READ_KEYS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.original_context_length", "rope.scaling.finetuned",
)  # fmt: skip
# What Llama 3.1 and 3.2 have in common; the file keeps the factors that follow from them, not the numbers themselves.
LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR, LLAMA3_ORIGINAL_CONTEXT = 1.0, 4.0, 8192


def read_gguf_config(path: Path) -> ModelConfig:
    header = read_header(path)
    Fields(str(path), header.metadata).require({"split.count": (0, 1)})
    architecture = _architecture(path, header)
    fields = _architecture_fields(path, header, architecture)
    hidden_size, num_heads = fields.integer("embedding_length"), _uniform(fields, "attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    rope_theta = fields.number("rope.freq_base", 10_000.0)
    fields.require({"attention.value_length": (head_dim,), "rope.dimension_count": (head_dim,)})
    return ModelConfig(
        vocab_size=_vocab_size(fields, header),
        hidden_size=hidden_size,
        intermediate_size=_uniform(fields, "feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=_uniform(fields, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=_shortest(fields.number("attention.layer_norm_rms_epsilon")),
        rope_theta=rope_theta,
        max_position=fields.integer("context_length"),
        tied_head="output.weight" not in header.tensors,
        rope_scaling=_rope_scaling(path, header, head_dim, rope_theta, fields),
        qkv_bias=architecture == QWEN2 or "blk.0.attn_q.bias" in header.tensors,
        out_bias="blk.0.attn_output.bias" in header.tensors,
        qk_norm=architecture == QWEN3,
    )


def _architecture(path: Path, header: GGUFHeader) -> str:
    architecture = header.metadata.get("general.architecture")
    if isinstance(architecture, str) and architecture in ARCHITECTURES:
        return architecture
    raise StartupError(f"{path}: general.architecture = {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _architecture_fields(path: Path, header: GGUFHeader, architecture: str) -> Fields:
    """The keys under the architecture's own prefix, all of them known and with values we can serve."""
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    fields = Fields(f"{path}: {architecture}", own)
    fields.require(SUPPORTED_VALUES)
    fields.require_known((*READ_KEYS, *SUPPORTED_VALUES))
    return fields


def _uniform(fields: Fields, key: str, default: int | None = None) -> int:
    """A number that may be written once or once a layer; layers that differ are refused."""
    value = fields.get(key)
    if not isinstance(value, list):
        return fields.integer(key, default)
    if len(set(value)) != 1:
        raise fields.refused(key)
    return Fields(fields.source, {key: value[0]}).integer(key)


def _vocab_size(fields: Fields, header: GGUFHeader) -> int:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else fields.integer("vocab_size")


def _shortest(value: float) -> float:
    """The decimal a float32 was written from: 1e-05 is stored as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(path: Path, header: GGUFHeader, head_dim: int, rope_theta: float, fields: Fields) -> Llama3Scaling | None:
    """Llama 3's scaling, told by the factors the file keeps in its place; any other factors are refused."""
    entry = header.tensors.get(ROPE_FACTORS)
    if entry is None:
        return None
    factors = np.frombuffer(entry.data, np.float32)
    if np.all(factors == 1):
        return None
    original = fields.integer("rope.scaling.original_context_length", LLAMA3_ORIGINAL_CONTEXT)
    scaling = Llama3Scaling(float(np.max(factors)), LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR, original)
    expected = llama3_factors(scaling, head_dim, rope_theta)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise StartupError(f"{path}: {ROPE_FACTORS} does not follow Llama 3's rotary scaling; other factors are not supported")
    return scaling


def llama3_factors(scaling: Llama3Scaling, head_dim: int, rope_theta: float) -> NDArray[np.float64]:
    """By how much each rotary frequency is slowed, as llama.cpp's converter works it out."""
    wavelengths = 2 * math.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position / wavelengths - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling.factor + smooth))
