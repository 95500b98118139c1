"""Turns a Hugging Face config.json into a `ModelConfig`, or says by name and value what levserve cannot serve.

Reads both the form transformers 5 writes (`rope_parameters`) and the older one (`rope_theta` and `rope_scaling`). Where a key
is absent the value is the one transformers would take. Keys that do not change the forward pass (token ids, dropout,
initializer_range ...) are not looked at.
"""

from __future__ import annotations

import json
from pathlib import Path

from levserve.errors import StartupError
from levserve.model.config import Llama3Scaling, ModelConfig
from levserve.weights.fields import Fields

LLAMA, MISTRAL, QWEN2, QWEN3 = ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# Keys that would change the forward pass, each with the values that leave it as we compute it.
SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", None),
    "hidden_activation": ("silu", None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
    "logit_scale": (1.0, None),
    "attention_chunk_size": (None,),
    "num_local_experts": (0, None),
    "num_experts": (0, None),
    "no_rope_layers": ([], None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}
DEFAULT_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
LLAMA3_ROPE_KEYS = (*DEFAULT_ROPE_KEYS, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DEFAULT_WINDOW, DEFAULT_MAX_WINDOW_LAYERS = 4096, 28  # transformers' defaults for Mistral and Qwen


def read_hf_config(path: Path) -> ModelConfig:
    fields = _read_fields(path)
    architecture = _architecture(fields)
    fields.require(SUPPORTED_VALUES)
    hidden_size, num_heads, num_layers = (fields.integer(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    attention_bias = fields.flag("attention_bias", False) and architecture != QWEN2
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        norm_eps=fields.number("rms_norm_eps"),
        rope_theta=_rope_theta(fields),
        max_position=fields.integer("max_position_embeddings"),
        tied_head=fields.flag("tie_word_embeddings", False),
        rope_scaling=_rope_scaling(fields),
        qkv_bias=attention_bias or architecture == QWEN2,
        out_bias=attention_bias,
        qk_norm=architecture == QWEN3,
        windows=_windows(fields, architecture, num_layers),
    )


def _read_fields(path: Path) -> Fields:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise StartupError(f"cannot read {path}: it does not hold a JSON object")
    return Fields(str(path), values)


def _architecture(fields: Fields) -> str:
    architectures = fields.get("architectures")
    if isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in ARCHITECTURES:
        return str(architectures[0])
    raise StartupError(f"{fields.source}: architectures = {architectures!r} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _rope_theta(fields: Fields) -> float:
    return fields.mapping("rope_parameters").number("rope_theta", fields.number("rope_theta", 10_000.0))


def _rope_scaling(fields: Fields) -> Llama3Scaling | None:
    """The scaling of whichever of the two forms is there; both are checked where both are."""
    max_position = fields.integer("max_position_embeddings")
    written, older = (_read_scaling(fields.mapping(key), max_position) for key in ("rope_parameters", "rope_scaling"))
    return written or older


def _read_scaling(rope: Fields, max_position: int) -> Llama3Scaling | None:
    rope.require({"rope_type": ("default", "llama3", None), "type": ("default", "llama3", None), "partial_rotary_factor": (1.0, None)})
    if "llama3" not in (rope.get("rope_type"), rope.get("type")):
        rope.require_known(DEFAULT_ROPE_KEYS)
        return None
    rope.require_known(LLAMA3_ROPE_KEYS)
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
    )


def _windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window: all of Mistral's when it has one, Qwen's from `max_window_layers` up when it is switched on."""
    window = _window(fields, architecture)
    is_qwen = architecture in (QWEN2, QWEN3)
    first = fields.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0) if is_qwen else 0
    slides = [window is not None and layer >= first for layer in range(num_layers)]
    if (types := fields.get("layer_types")) is not None:
        slides = _listed_windows(fields, types, slides, is_free=is_qwen and window is not None)
    return tuple(window if slide else None for slide in slides) if any(slides) else ()


def _window(fields: Fields, architecture: str) -> int | None:
    if architecture == LLAMA:
        fields.require({"sliding_window": (None,)})
        return None
    if architecture in (QWEN2, QWEN3) and not fields.flag("use_sliding_window", False):
        return None
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        return None
    return fields.integer("sliding_window", DEFAULT_WINDOW)


def _listed_windows(fields: Fields, types: object, slides: list[bool], *, is_free: bool) -> list[bool]:
    """What `layer_types` says; unless the list is free to choose it has to agree with the other keys."""
    names = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != len(slides) or any(name not in names for name in types):
        raise fields.refused("layer_types")
    listed = [names[name] for name in types]
    if listed != slides and not is_free:
        raise fields.refused("layer_types")
    return listed
