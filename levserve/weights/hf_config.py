"""Turns a Hugging Face config.json into a `ModelConfig`, or names the key and value that it cannot serve.

It reads what transformers 5 writes (`rope_parameters`) and the older form (`rope_theta` and `rope_scaling`).
An absent key has the default of transformers. Keys that do not change the forward pass (token ids, dropout,
initializer_range, ...) are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from levserve.errors import StartupError
from levserve.model.config import (
    Activation,
    ModelConfig,
)
from levserve.weights.config_fields import Fields
from levserve.weights.rope_scaling import read_scaling, scaled_context

# Keys that change the forward pass, each with the values for which it is as we compute it.
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
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
    "no_rope_layers": ([], None),
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
}
GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""Names of one formula."""
QWEN_WINDOW_FROM = 28  # transformers' default of `max_window_layers`

Extras = dict[str, Any]
"""Fields of `ModelConfig`."""
Slides = Callable[[Fields, int], "list[bool] | None"]
"""Which layers have a sliding window, unless `layer_types` says it; None if no layer can have one."""


def _no_layer(fields: Fields, num_layers: int) -> list[bool] | None:
    return None


def _every_layer(fields: Fields, num_layers: int) -> list[bool]:
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


def _mixtral(fields: Fields) -> Extras:
    return {
        "num_experts": fields.integer("num_local_experts"),
        "experts_per_token": fields.integer("num_experts_per_tok"),
    }


def _qwen3_moe(fields: Fields) -> Extras:
    key = "num_experts" if fields.has("num_experts") else "num_local_experts"  # as transformers 5 writes it
    return _attention_bias(fields) | {
        "num_experts": fields.integer(key),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "renormalises_experts": fields.flag("norm_topk_prob", False),
        "intermediate_size": fields.integer("moe_intermediate_size"),
    }


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes an architecture from Llama."""

    always: Extras = field(default_factory=dict)
    """Fields of `ModelConfig` that every model of the family has."""
    read: Callable[[Fields], Extras] = _attention_bias
    """Reads further fields from config.json."""
    slides: Slides = _no_layer
    supported: dict[str, tuple[object, ...] | None] = field(default_factory=dict)
    """Replaces entries of SUPPORTED_VALUES; None allows any value, because `read` takes care of it."""
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
UNGATED: Extras = {"has_layer_norms": True, "mlp_bias": True, "is_gated": False}
"""GPT-2, GPT-NeoX and Phi-2: layer norms, and a feed-forward part with biases and without a gate."""
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(slides=_every_layer, defaults={"sliding_window": 4096}),
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
        read=lambda fields: {}, slides=_every_layer, supported={"partial_rotary_factor": None}
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
    "MixtralForCausalLM": Family({}, _mixtral, _every_layer, {"num_local_experts": None}),
    "Qwen3MoeForCausalLM": Family(
        {"qk_norm": True},
        _qwen3_moe,
        _qwen_layers,
        {"num_experts": None, "num_local_experts": None},
        {"sliding_window": 4096},
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


def read_hf_config(path: Path) -> ModelConfig:
    return make_hf_config(_read_fields(path))


def make_hf_config(written: Fields) -> ModelConfig:
    """The configuration that the keys of a config.json describe; Levanter's reader calls this too."""
    family = _family(written)
    if family.inside:
        written = written.mapping(family.inside)
    fields = Fields(written.source, {**family.defaults, **written.values})
    supported = {**SUPPORTED_VALUES, **family.supported}
    fields.require({key: values for key, values in supported.items() if values is not None})
    hidden_size = fields.integer(family.key("hidden_size"))
    num_heads = fields.integer(family.key("num_attention_heads"))
    num_layers = fields.integer(family.key("num_hidden_layers"))
    max_position = fields.integer(family.key("max_position_embeddings"))
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    extras = family.always | family.read(fields)
    shape: Extras = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "norm_eps": fields.number(family.key("rms_norm_eps")),
        "max_position": max_position,
        "tied_head": fields.flag("tie_word_embeddings", False),
        "windows": _windows(fields, family, num_layers),
    }
    if "intermediate_size" not in extras:
        shape["intermediate_size"] = fields.integer("intermediate_size")
    if "rope_theta" not in extras:
        shape |= _rope(fields, family, head_dim, max_position)
        shape["max_position"] = scaled_context(shape["rope_scaling"], max_position)
    return ModelConfig(**shape | extras)


def _read_fields(path: Path) -> Fields:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise StartupError(f"cannot read {path}: expected a JSON object")
    return Fields(str(path), values)


def _family(fields: Fields) -> Family:
    architectures = fields.get("architectures")
    if isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in FAMILIES:
        return FAMILIES[architectures[0]]
    supported = ", ".join(FAMILIES)
    raise StartupError(
        f"{fields.source}: architectures = {architectures!r} is not supported; supported are {supported}"
    )


def _rope(fields: Fields, family: Family, head_dim: int, max_position: int) -> Extras:
    """Reads the rotary positions. If both forms are present both are checked, and the newer one counts."""
    newer, older = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if family.has_local_rope and newer.has("full_attention"):
        newer.require_known(("full_attention", "sliding_attention"))
        newer = newer.mapping("full_attention")
    if "partial_rotary_factor" not in family.supported:
        for rope in (newer, older):
            rope.require({"partial_rotary_factor": (1.0, None)})
    portion = newer.number("partial_rotary_factor", fields.number(family.key("partial_rotary_factor"), 1.0))
    rotary_size = int(head_dim * portion)
    original = fields.integer("original_max_position_embeddings", max_position)
    scalings = [read_scaling(rope, max_position, original, rotary_size) for rope in (newer, older)]
    return {
        "rope_theta": newer.number("rope_theta", fields.number(family.key("rope_theta"), 10_000.0)),
        "rope_scaling": scalings[0] or scalings[1],
        "rotary_size": None if rotary_size == head_dim else rotary_size,
    }


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window, as the family defines it or as `layer_types` lists it."""
    slides = family.slides(fields, num_layers)
    if slides is None:
        fields.require({"sliding_window": (None,)})
        slides = [False] * num_layers
    elif fields.get("sliding_window") is None:
        slides = [False] * num_layers
    types = fields.get("layer_types")
    if types is not None:
        is_free = family.slides not in (_no_layer, _every_layer)
        slides = _listed_windows(fields, types, slides, is_free=is_free)
    if not any(slides):
        return ()
    window = fields.integer("sliding_window")
    return tuple(window if slide else None for slide in slides)


def _listed_windows(fields: Fields, types: object, slides: list[bool], *, is_free: bool) -> list[bool]:
    """Which layers `layer_types` gives a window. Unless it `is_free`, it must agree with the other keys."""
    names = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != len(slides) or any(name not in names for name in types):
        raise fields.refused("layer_types")
    listed = [names[name] for name in types]
    if listed != slides and not (is_free and any(slides)):
        raise fields.refused("layer_types")
    return listed
