"""Reads the parts of config.json that differ between families of Hugging Face checkpoints.

Each function reads some fields of a `ModelConfig`, or says which layers have a sliding window; the table in
`families.py` names the functions of each family.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from levserve.model.config import Activation, Latent
from levserve.weights.config_fields import Extras, Fields
from levserve.weights.mixtures import (
    read_deepseek2_experts,
    read_deepseek_experts,
    read_mixtral_experts,
    read_qwen_experts,
)
from levserve.weights.rope_scaling import yarn_attention_factor

GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""Names of the same formula."""
QWEN_WINDOW_FROM = 28  # transformers' default of `max_window_layers`

Slides = Callable[[Fields, int], "list[bool] | None"]
"""Which layers have a sliding window, unless `layer_types` says it; None if no layer can have one."""


def no_layer(fields: Fields, num_layers: int) -> list[bool] | None:
    return None


def every_layer(fields: Fields, num_layers: int) -> list[bool]:
    return [True] * num_layers


def qwen_layers(fields: Fields, num_layers: int) -> list[bool]:
    if not fields.flag("use_sliding_window", False):
        return [False] * num_layers
    first = fields.integer("max_window_layers", QWEN_WINDOW_FROM, minimum=0)
    return [layer >= first for layer in range(num_layers)]


def qwen2_moe_layers(fields: Fields, num_layers: int) -> list[bool]:
    if not fields.flag("use_sliding_window", False):
        return [False] * num_layers
    end = fields.integer("max_window_layers", QWEN_WINDOW_FROM, minimum=0)
    return [layer % 2 == 0 and layer < end for layer in range(num_layers)]


def qwen3_moe_layers(fields: Fields, num_layers: int) -> list[bool]:
    return [fields.flag("use_sliding_window", False)] * num_layers


def gemma2_layers(fields: Fields, num_layers: int) -> list[bool]:
    return [layer % 2 == 0 for layer in range(num_layers)]


def gemma3_layers(fields: Fields, num_layers: int) -> list[bool]:
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    return [(layer + 1) % pattern != 0 for layer in range(num_layers)]


def olmo3_layers(fields: Fields, num_layers: int) -> list[bool]:
    return [(layer + 1) % 4 != 0 for layer in range(num_layers)]


def read_attention_bias(fields: Fields) -> Extras:
    has_bias = fields.flag("attention_bias", False)
    return {"qkv_bias": has_bias, "out_bias": has_bias}


def read_gemma(fields: Fields) -> Extras:
    return read_attention_bias(fields) | {"embed_scale": math.sqrt(fields.integer("hidden_size"))}


def read_gemma2(fields: Fields) -> Extras:
    return read_gemma(fields) | {
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }


def read_gemma3(fields: Fields) -> Extras:
    return read_gemma2(fields) | _local_rope(fields, fields.number("rope_local_base_freq", 10_000.0))


def read_olmo3(fields: Fields) -> Extras:
    return read_attention_bias(fields) | _local_rope(fields, fields.number("rope_theta"))


def _local_rope(fields: Fields, default: float) -> Extras:
    """The rotary positions of layers with a window, which are never scaled."""
    local = fields.mapping("rope_parameters").mapping("sliding_attention")
    local.require({"rope_type": ("default", None)})
    return {"local_rope_theta": local.number("rope_theta", default)}


def read_granite(fields: Fields) -> Extras:
    return read_attention_bias(fields) | {
        "embed_scale": fields.number("embedding_multiplier", 1.0),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logit_scale": 1 / fields.number("logits_scaling", 1.0),
    }


def read_cohere(fields: Fields) -> Extras:
    return read_attention_bias(fields) | {"logit_scale": fields.number("logit_scale", 0.0625)}


def read_gpt_neox(fields: Fields) -> Extras:
    is_exact = fields.get("hidden_act") in ("gelu", None)
    return read_attention_bias(fields) | {
        "is_parallel": fields.flag("use_parallel_residual", True),
        "activation": Activation.GELU if is_exact else Activation.GELU_TANH,
    }


def read_qwen3_moe(fields: Fields) -> Extras:
    return read_attention_bias(fields) | read_qwen_experts(fields)


def read_qwen2_moe(fields: Fields) -> Extras:
    return read_qwen_experts(fields) | {
        "qkv_bias": fields.flag("qkv_bias", True),
        "shared_size": fields.integer("shared_expert_intermediate_size"),
    }


def read_glm4_moe(fields: Fields) -> Extras:
    return read_deepseek_experts(fields) | {
        "qkv_bias": fields.flag("attention_bias", False),
        "qk_norm": fields.flag("use_qk_norm", False),
    }


def read_deepseek2(fields: Fields) -> Extras:
    return _latent_attention(fields) | read_deepseek2_experts(fields)


def read_deepseek3(fields: Fields) -> Extras:
    is_interleaved = fields.flag("rope_interleave", True)
    return _latent_attention(fields, is_interleaved=is_interleaved) | read_deepseek_experts(fields)


def _latent_attention(fields: Fields, *, is_interleaved: bool = True) -> Extras:
    query_rank = None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank")
    rotary_size = fields.integer("qk_rope_head_dim")
    head_dim = fields.integer("qk_nope_head_dim") + rotary_size
    if fields.integer("v_head_dim") > head_dim:
        raise fields.refused("v_head_dim")
    return {
        "head_dim": head_dim,
        "rotary_size": rotary_size,
        "num_kv_heads": fields.integer("num_attention_heads"),
        "attention_scale": head_dim**-0.5 * _yarn_score_factor(fields),
        "latent": Latent(
            fields.integer("kv_lora_rank"),
            query_rank,
            rotary_size,
            fields.integer("v_head_dim"),
            is_interleaved,
        ),
    }


def _yarn_score_factor(fields: Fields) -> float:
    """The factor of DeepSeek's attention scores in a context that YaRN has stretched."""
    newer, older = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    rope = older if older.values else newer
    scale = rope.optional_number("mscale_all_dim")
    return 1.0 if scale is None else yarn_attention_factor(rope.number("factor"), scale) ** 2


def read_gpt_oss(fields: Fields) -> Extras:
    ropes = [fields.mapping(key).values for key in ("rope_parameters", "rope_scaling")]
    if not any(ropes):
        raise fields.wrong("rope_scaling", "an object")  # transformers takes YaRN of gpt-oss-120b
    limit = {"gate_limit": fields.number("swiglu_limit", 7.0)}
    return read_attention_bias(fields) | read_mixtral_experts(fields) | limit
