"""The architectures of Hugging Face checkpoints, each described by what distinguishes it from Llama.

A family says how its config.json becomes a `ModelConfig`; `hf_config.py` reads the file, and the reader of
GGUF files uses the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from levserve.model.config import Activation
from levserve.weights.config_fields import Extras, Fields
from levserve.weights.family_readers import (
    GELU_TANH,
    Slides,
    every_layer,
    gemma2_layers,
    gemma3_layers,
    no_layer,
    olmo3_layers,
    qwen2_moe_layers,
    qwen3_moe_layers,
    qwen_layers,
    read_attention_bias,
    read_cohere,
    read_deepseek2,
    read_deepseek3,
    read_gemma,
    read_gemma2,
    read_gemma3,
    read_glm4_moe,
    read_gpt_neox,
    read_gpt_oss,
    read_granite,
    read_olmo3,
    read_qwen2_moe,
    read_qwen3_moe,
)
from levserve.weights.mixtures import read_mixtral_experts


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes an architecture from Llama."""

    always: Extras = field(default_factory=dict)
    """Fields of `ModelConfig` that every model of the family has."""
    read: Callable[[Fields], Extras] = read_attention_bias
    """Reads further fields from config.json."""
    slides: Slides = no_layer
    supported: dict[str, tuple[object, ...] | None] = field(default_factory=dict)
    """Replaces entries of `hf_config.SUPPORTED_VALUES`; None allows any value, because `read` handles it."""
    defaults: Extras = field(default_factory=dict)
    """Values that transformers takes for absent keys."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The family's own names for keys that every family has."""
    inside: str = ""
    """Key of the language model's configuration, if the model has other parts too."""
    has_local_rope: bool = False
    """Layers with a sliding window have other rotary positions than the rest, and `rope_parameters` has an
    entry for each kind of layer."""

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
    read_gemma3,
    gemma3_layers,
    GEMMA2_KEYS | {"attn_logit_softcapping": (None,)},  # transformers ignores it
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
        {"qkv_bias": True}, lambda fields: {}, qwen_layers, defaults={"sliding_window": 4096}
    ),
    "Qwen3ForCausalLM": Family(
        {"qk_norm": True}, slides=qwen_layers, defaults={"head_dim": 128, "sliding_window": 4096}
    ),
    "GemmaForCausalLM": Family(
        GEMMA,
        read_gemma,
        supported={
            "hidden_act": ("gelu", "gelu_pytorch_tanh", None),  # both mean the same in the first releases
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
        read_gemma2,
        gemma2_layers,
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
    "Gemma3ForConditionalGeneration": replace(
        GEMMA3,
        supported=GEMMA3.supported | {"final_logit_softcapping": (None,)},  # transformers ignores it here
        inside="text_config",
    ),
    "Phi3ForCausalLM": Family(
        read=lambda fields: {}, slides=every_layer, supported={"partial_rotary_factor": None}
    ),
    "Olmo2ForCausalLM": Family(OLMO2),
    "Olmo3ForCausalLM": Family(
        OLMO2,
        read_olmo3,
        olmo3_layers,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        has_local_rope=True,
    ),
    "GraniteForCausalLM": Family(
        read=read_granite,
        supported={
            "embedding_multiplier": None,
            "attention_multiplier": None,
            "residual_multiplier": None,
            "logits_scaling": None,
        },
        defaults={"rms_norm_eps": 1e-6},
    ),
    "MixtralForCausalLM": Family(
        {}, read_mixtral_experts, every_layer, {"num_local_experts": None}, {"rope_theta": 1e6}
    ),
    "Qwen3MoeForCausalLM": Family(
        {"qk_norm": True}, read_qwen3_moe, qwen3_moe_layers, QWEN_EXPERTS, {"sliding_window": 4096}
    ),
    "Qwen2MoeForCausalLM": Family(
        {"has_shared_gate": True}, read_qwen2_moe, qwen2_moe_layers, QWEN_EXPERTS, {"sliding_window": 4096}
    ),
    "Glm4MoeForCausalLM": Family(
        {},
        read_glm4_moe,
        supported={"num_experts": None, "num_local_experts": None, "partial_rotary_factor": None},
        defaults={"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "DeepseekV2ForCausalLM": Family(
        {},
        read_deepseek2,
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
        read_deepseek3,
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
            "has_transposed_experts": True,
        },
        read_gpt_oss,
        gemma2_layers,
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
        read_cohere,
        supported={"logit_scale": None, "use_qk_norm": (False, None)},
        defaults={"layer_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
        keys={"rms_norm_eps": "layer_norm_eps"},
    ),
    "GPTNeoXForCausalLM": Family(
        UNGATED,
        read_gpt_neox,
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
