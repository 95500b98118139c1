"""Reads how a Hugging Face config stretches rotary positions, and what that does to the context."""

from __future__ import annotations

import math

from levserve.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeScaling,
    YarnScaling,
)
from levserve.weights.config_fields import Fields

SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
        "original_max_position_embeddings",
    ),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": (
        "short_factor",
        "long_factor",
        "factor",
        "attention_factor",
        "original_max_position_embeddings",
    ),
}
ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read_scaling(rope: Fields, max_position: int, original: int, rotary_size: int) -> RopeScaling | None:
    types = (None, "su", *SCALING_KEYS)  # longrope was called su at first
    rope.require({"rope_type": types, "type": types})
    kind = str(rope.get("rope_type") or rope.get("type") or "default").replace("su", "longrope")
    rope.require_known((*ROPE_KEYS, *SCALING_KEYS[kind]))
    original = rope.integer("original_max_position_embeddings", original)
    match kind:
        case "linear":
            return LinearScaling(rope.number("factor"))
        case "dynamic":
            factor = rope.number("factor")
            if rotary_size <= 2:
                raise rope.refused("rope_type")  # its formula divides by the size minus two
            return DynamicScaling(factor, max_position, int(factor * max_position))
        case "yarn":
            return _yarn(rope, rope.number("factor", max_position / original), original)
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            return Llama3Scaling(rope.number("factor"), low, high, original)
        case "longrope":
            short = rope.numbers("short_factor", rotary_size // 2)
            long = rope.numbers("long_factor", rotary_size // 2)
            factor = rope.number("factor", max_position / original)
            by_length = long_attention_factor(factor, original)
            return LongScaling(short, long, original, rope.number("attention_factor", by_length))
    return None


def _yarn(rope: Fields, factor: float, original: int) -> YarnScaling:
    scales = [rope.optional_number(key) for key in ("mscale", "mscale_all_dim")]
    by_factor = yarn_attention_factor(factor)
    if None not in scales:
        numerator, denominator = (yarn_attention_factor(factor, scale or 1.0) for scale in scales)
        by_factor = numerator / denominator
    return YarnScaling(
        factor,
        original,
        rope.number("attention_factor", by_factor),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncates=rope.flag("truncate", True),
    )


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor for queries and keys, for a context `factor` times as long as the original."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def scaled_context(scaling: RopeScaling | None, max_position: int) -> int:
    """The number of positions with scaling; configs give `max_position` with or without it."""
    match scaling:
        case YarnScaling(factor, original):
            return max(max_position, int(factor * original))
        case DynamicScaling():
            return scaling.max_seq_len
    return max_position


def long_attention_factor(factor: float, original: int) -> float:
    """Phi-3's factor for queries and keys, for a context `factor` times as long as the original."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
