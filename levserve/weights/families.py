"""The architectures of Hugging Face checkpoints, each by what distinguishes it from Llama.

A family says how its config.json becomes a `ModelConfig`; `hf_config.py` reads the file, and the reader of
GGUF files uses the same table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

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
"""Names of one formula."""
QWEN_WINDOW_FROM = 28  # transformers' default of `max_window_layers`

Slides = Callable[[Fields, int], "list[bool] | None"]
"""Which layers have a sliding window, unless `layer_types` says it; None if no layer can have one."""


def no_layer(fields: Fields, num_layers: int) -> list[bool] | None:
    return None


def every_layer(fields: Fields, num_layers: int) -> list[bool]:
    return [True] * num_layers


def _qwen_layers(fields: Fields, num_layers: int) -> list[bool]:
    if not fields.flag("use_sliding_window", False):
        return [False] * num_layers
    first = fields.integer("max_window_layers", QWEN_WINDOW_FROM, minimum=0)
    return [layer >= first for layer in range(num_layers)]


def _gemma2_layers(fields: Fields, num_layers: int) -> list[bool]:
    return [layer % 2 == 0 for layer in range(num_layers)]


def _gemma3_layers(fields: Fields, num_layers: int) -> list[bool]:
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    return [(layer + 1) % pattern != 0 for layer in range(num_layers)]


def _olmo3_layers(fields: Fields, num_layers: int) -> list[bool]:
    return [(layer + 1) % 4 != 0 for layer in range(num_layers)]


def _attention_bias(fields: Fields) -> Extras:
    has_bias = fields.flag("attention_bias", False)
    return {"qkv_bias": has_bias, "out_bias": has_bias}


def _gemma(fields: Fields) -> Extras:
    return _attention_bias(fields) | {"embed_scale": math.sqrt(fields.integer("hidden_size"))}


def _gemma2(fields: Fields) -> Extras:
    return _gemma(fields) | {
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }


def _gemma3(fields: Fields) -> Extras:
    return _gemma2(fields) | _local_rope(fields, fields.number("rope_local_base_freq", 10_000.0))


def _olmo3(fields: Fields) -> Extras:
    return _attention_bias(fields) | _local_rope(fields, fields.number("rope_theta"))


def _local_rope(fields: Fields, default: float) -> Extras:
    """The rotary positions of layers with a window, which are never scaled."""
    local = fields.mapping("rope_parameters").mapping("sliding_attention")
    local.require({"rope_type": ("default", None)})
    return {"local_rope_theta": local.number("rope_theta", default)}


def _granite(fields: Fields) -> Extras:
    return _attention_bias(fields) | {
        "embed_scale": fields.number("embedding_multiplier", 1.0),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logit_scale": 1 / fields.number("logits_scaling", 1.0),
    }


def _cohere(fields: Fields) -> Extras:
    return _attention_bias(fields) | {"logit_scale": fields.number("logit_scale", 0.0625)}


def _gpt_neox(fields: Fields) -> Extras:
    is_exact = fields.get("hidden_act") in ("gelu", None)
    return _attention_bias(fields) | {
        "is_parallel": fields.flag("use_parallel_residual", True),
        "activation": Activation.GELU if is_exact else Activation.GELU_TANH,
    }


def _qwen3_moe(fields: Fields) -> Extras:
    return _attention_bias(fields) | read_qwen_experts(fields)


def _qwen2_moe(fields: Fields) -> Extras:
    return read_qwen_experts(fields) | {
        "qkv_bias": fields.flag("qkv_bias", True),
        "shared_size": fields.integer("shared_expert_intermediate_size"),
    }


def _glm4_moe(fields: Fields) -> Extras:
    return read_deepseek_experts(fields) | {
        "qkv_bias": fields.flag("attention_bias", False),
        "qk_norm": fields.flag("use_qk_norm", False),
    }


def _deepseek2(fields: Fields) -> Extras:
    return _latent_attention(fields) | read_deepseek2_experts(fields)


def _deepseek3(fields: Fields) -> Extras:
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
    """What DeepSeek multiplies scores by in a context that YaRN has stretched."""
    newer, older = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    rope = newer if newer.has("rope_type") else older
    scale = rope.optional_number("mscale_all_dim")
    return 1.0 if scale is None else yarn_attention_factor(rope.number("factor"), scale) ** 2


def _gpt_oss(fields: Fields) -> Extras:
    limit = {"gate_limit": fields.number("swiglu_limit", 7.0)}
    return _attention_bias(fields) | read_mixtral_experts(fields) | limit


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes an architecture from Llama."""

    always: Extras = field(default_factory=dict)
    """Fields of `ModelConfig` that every model of the family has."""
    read: Callable[[Fields], Extras] = _attention_bias
    """Reads further fields from config.json."""
    slides: Slides = no_layer
    supported: dict[str, tuple[object, ...] | None] = field(default_factory=dict)
    """Replaces entries of `hf_config.SUPPORTED_VALUES`; None allows any value, because `read` takes care of
    it."""
    defaults: Extras = field(default_factory=dict)
    """Values that transformers takes for absent keys."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The family's own names for keys that every family has."""
    inside: str = ""
    """Key of the language model's configuration, if the model has other parts too."""
    has_local_rope: bool = False
    """Layers with a window have rotary positions of their own, and `rope_parameters` an entry for each
    kind."""

    def key(self, key: str) -> str:
        return self.keys.get(key, key)


GEMMA: Extras = {"has_offset_norms": True, "activation": Activation.GELU_TANH}
GEMMA2: Extras = GEMMA | {"has_post_norms": True}
GEMMA2_KEYS: dict[str, tuple[object, ...] | None] = {
    "hidden_act": None,  # transformers ignores it
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
}
GEMMA3 = Family(
    GEMMA2 | {"qk_norm": True},
    _gemma3,
    _gemma3_layers,
    GEMMA2_KEYS,
    {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    has_local_rope=True,
)
OLMO2: Extras = {
    "has_pre_norms": False,
    "has_post_norms": True,
    "qk_norm": True,
    "qk_norm_spans_heads": True,
}
QWEN_EXPERTS: dict[str, tuple[object, ...] | None] = {
    "num_experts": None,
    "num_local_experts": None,
    "mlp_only_layers": None,
    "decoder_sparse_step": None,
}
DEEPSEEK: dict[str, tuple[object, ...] | None] = {
    "num_experts": None,
    "num_local_experts": None,
    "attention_bias": (False, None),
    "moe_layer_freq": (1, None),
}
UNGATED: Extras = {"has_layer_norms": True, "mlp_bias": True, "is_gated": False}
"""GPT-2, GPT-NeoX and Phi-2: layer norms, and a feed-forward part with biases and without a gate."""
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(slides=every_layer, defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(
        {"qkv_bias": True}, lambda fields: {}, _qwen_layers, defaults={"sliding_window": 4096}
    ),
    "Qwen3ForCausalLM": Family({"qk_norm": True}, slides=_qwen_layers, defaults={"sliding_window": 4096}),
    "GemmaForCausalLM": Family(
        GEMMA,
        _gemma,
        supported={
            "hidden_act": ("gelu", "gelu_pytorch_tanh", None),  # the first releases mean the same by both
            "hidden_activation": ("gelu_pytorch_tanh", None),
        },
        defaults={
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma2ForCausalLM": Family(
        GEMMA2,
        _gemma2,
        _gemma2_layers,
        GEMMA2_KEYS,
        {
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": replace(GEMMA3, inside="text_config"),
    "Phi3ForCausalLM": Family(
        read=lambda fields: {}, slides=every_layer, supported={"partial_rotary_factor": None}
    ),
    "Olmo2ForCausalLM": Family(OLMO2),
    "Olmo3ForCausalLM": Family(
        OLMO2,
        _olmo3,
        _olmo3_layers,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        has_local_rope=True,
    ),
    "GraniteForCausalLM": Family(
        read=_granite,
        supported={
            "embedding_multiplier": None,
            "attention_multiplier": None,
            "residual_multiplier": None,
            "logits_scaling": None,
        },
        defaults={"rms_norm_eps": 1e-6},
    ),
    "MixtralForCausalLM": Family({}, read_mixtral_experts, every_layer, {"num_local_experts": None}),
    "Qwen3MoeForCausalLM": Family(
        {"qk_norm": True}, _qwen3_moe, _qwen_layers, QWEN_EXPERTS, {"sliding_window": 4096}
    ),
    "Qwen2MoeForCausalLM": Family(
        {"has_shared_gate": True}, _qwen2_moe, _qwen_layers, QWEN_EXPERTS, {"sliding_window": 4096}
    ),
    "Glm4MoeForCausalLM": Family(
        {},
        _glm4_moe,
        supported={"num_experts": None, "num_local_experts": None, "partial_rotary_factor": None},
        defaults={"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "DeepseekV2ForCausalLM": Family(
        {},
        _deepseek2,
        supported=DEEPSEEK
        | {
            "scoring_func": ("softmax", None),
            "topk_method": ("greedy", "group_limited_greedy", None),
            "norm_topk_prob": (False, None),
        },
        defaults={"first_k_dense_replace": 0, "n_shared_experts": 2, "rms_norm_eps": 1e-6},
    ),
    "DeepseekV3ForCausalLM": Family(
        {},
        _deepseek3,
        supported=DEEPSEEK | {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)},
        defaults={
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-6,
        },
    ),
    "GptOssForCausalLM": Family(
        {
            "has_sinks": True,
            "activation": Activation.GELU_QUICK,
            "up_offset": 1.0,
            "mlp_bias": True,
            "router_bias": True,
            "has_turned_experts": True,
        },
        _gpt_oss,
        _gemma2_layers,
        {"num_local_experts": None, "swiglu_alpha": (1.702, None)},
        {
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
        },
    ),
    "CohereForCausalLM": Family(
        {
            "has_layer_norms": True,
            "has_norm_biases": False,
            "is_parallel": True,
            "shares_norm": True,
            "has_interleaved_heads": True,
        },
        _cohere,
        supported={"logit_scale": None, "use_qk_norm": (False, None)},
        defaults={"layer_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
        keys={"rms_norm_eps": "layer_norm_eps"},
    ),
    "GPTNeoXForCausalLM": Family(
        UNGATED,
        _gpt_neox,
        supported={"hidden_act": ("gelu", *GELU_TANH, None), "partial_rotary_factor": None},
        defaults={"attention_bias": True, "layer_norm_eps": 1e-5, "rotary_pct": 0.25},
        keys={
            "rms_norm_eps": "layer_norm_eps",
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
        },
    ),
    "PhiForCausalLM": Family(
        UNGATED
        | {
            "is_parallel": True,
            "shares_norm": True,
            "qkv_bias": True,
            "out_bias": True,
            "head_bias": True,
            "activation": Activation.GELU_TANH,
        },
        lambda fields: {},
        supported={
            "hidden_act": (*GELU_TANH, None),
            "partial_rotary_factor": None,
            "qk_layernorm": (False, None),
            "tie_word_embeddings": (False, None),  # the head has a bias
        },
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        keys={"rms_norm_eps": "layer_norm_eps"},
    ),
    "GPT2LMHeadModel": Family(
        UNGATED
        | {
            "rope_theta": None,
            "has_position_table": True,
            "qkv_bias": True,
            "out_bias": True,
            "activation": Activation.GELU_TANH,
        },
        lambda fields: {"intermediate_size": fields.integer("n_inner", 4 * fields.integer("n_embd"))},
        supported={"activation_function": (*GELU_TANH, None)},
        defaults={"tie_word_embeddings": True},
        keys={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
            "intermediate_size": "n_inner",
        },
    ),
}
