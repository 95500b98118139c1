"""Turns the model part of a Levanter run's config.yaml into a `ModelConfig`, or names the wrong key.

Levanter's keys are translated to those of a Hugging Face config.json, and its reader does the rest. levserve
reproduces Levanter's forward pass, not the model that it would export: Levanter's Mistral, Qwen and Gemma
have sliding windows, final soft caps and query scales in the config that its forward pass does not use.
Vocabulary, head size and whether the head is tied are taken from the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from levserve.errors import StartupError
from levserve.model.config import ModelConfig
from levserve.weights.config_fields import Fields
from levserve.weights.hf_config import make_hf_config

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the checkpoint's arrays, by the Hugging Face name of the tensor that each becomes."""

# Keys that change the forward pass, each with the values that levserve supports.
SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "hybrid_norm": (False, None),
    "input_embedding_norm": (False, None),
    "use_bias": (False, None),
    "use_layer_norm_weight": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "attention_bias": (False, None),
}
LLAMA3: dict[str, object] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Levanter's defaults for absent keys, where they differ from those of Hugging Face's reader.
DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {"layer_norm_epsilon": 1e-5, "num_kv_heads": 32},
    "qwen": {"layer_norm_epsilon": 1e-5, "num_kv_heads": 32},
    "qwen3": {"layer_norm_epsilon": 1e-5, "num_kv_heads": 32},
    "mistral": {"layer_norm_epsilon": 1e-6, "num_kv_heads": 8},
    "mixtral": {
        "layer_norm_epsilon": 1e-6,
        "num_kv_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gemma": {"layer_norm_epsilon": 1e-5, "num_kv_heads": 1},
    "olmo2": {"layer_norm_epsilon": 1e-6, "num_kv_heads": 32},
    "gemma2": {"layer_norm_epsilon": 1e-5, "num_kv_heads": 1, "attn_logit_softcapping": 50.0},
    "gemma3": {"layer_norm_epsilon": 1e-5, "num_kv_heads": 1},
    "gpt2": {
        "layer_norm_epsilon": 1e-5,
        "mlp_scale": 4,
        "activation_function": "gelu_new",
        "max_seq_len": 1024,
    },
}
GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")


class PlainLoader(yaml.SafeLoader):
    """Reads Levanter's YAML as data. Enums, written there as Python calls, become their arguments."""

    def construct_python(self, tag_suffix: str, node: yaml.Node) -> object:
        match node:
            case yaml.ScalarNode():
                return self.construct_scalar(node)
            case yaml.SequenceNode():
                values = self.construct_sequence(node, deep=True)
                return values[0] if len(values) == 1 else values
            case yaml.MappingNode():
                return self.construct_mapping(node, deep=True)
        return None


PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", PlainLoader.construct_python)


def read_levanter_config(path: Path, shapes: Shapes) -> ModelConfig:
    """`path` is the run's config.yaml, a YAML file of the model part alone, or a Hugging Face config.json."""
    if path.suffix == ".json":
        return make_hf_config(Fields(str(path), read_mapping(path) | _tied(shapes)))
    run = Fields(str(path), read_mapping(path))
    fields = run.mapping("model") if run.has("model") else run
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in TRANSLATIONS:
        supported = ", ".join(TRANSLATIONS)
        raise StartupError(f"{fields.source}: type = {kind!r} is not supported; supported are {supported}")
    given = {key: value for key, value in fields.values.items() if value is not None}
    translated = TRANSLATIONS[kind](Fields(fields.source, DEFAULTS[kind] | given), shapes)
    return make_hf_config(Fields(fields.source, translated))


def read_tokenizer_name(path: Path) -> str | None:
    """The tokenizer that the run's config names: a folder or a name on the Hub."""
    run = Fields(str(path), read_mapping(path))
    if path.suffix == ".json":
        return None
    for part in (run, run.mapping("data"), run.mapping("model")):
        name = part.get("tokenizer")
        if isinstance(name, str) and name:
            return name
    return None


def read_mapping(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.load(text, PlainLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StartupError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise StartupError(f"cannot read {path}: expected a mapping")
    return values


def _llama(fields: Fields, shapes: Shapes) -> dict[str, object]:
    """Llama, Mistral, Qwen 2 and Qwen 3; they differ in norms and biases, which the arrays show."""
    fields.require(SUPPORTED_VALUES)
    _require_activation(fields, ("silu", "swish"))
    has_qk_norm = "model.layers.0.self_attn.q_norm.weight" in shapes
    has_bias = "model.layers.0.self_attn.q_proj.bias" in shapes
    architecture = "LlamaForCausalLM"
    if has_qk_norm:
        architecture = "Qwen3ForCausalLM"
    elif has_bias:
        architecture = "Qwen2ForCausalLM"
    return _common(fields, shapes) | {"architectures": [architecture], "hidden_act": "silu"}


def _mixtral(fields: Fields, shapes: Shapes) -> dict[str, object]:
    fields.require(SUPPORTED_VALUES | {"n_shared_experts": (0, None)})
    _require_activation(fields, ("silu", "swish"))
    return _common(fields, shapes) | {
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "num_local_experts": fields.integer("n_routed_experts"),
        "num_experts_per_tok": fields.integer("num_experts_per_tok"),
    }


def _olmo2(fields: Fields, shapes: Shapes) -> dict[str, object]:
    fields.require(SUPPORTED_VALUES)
    _require_activation(fields, ("silu", "swish"))
    return _common(fields, shapes) | {"architectures": ["Olmo2ForCausalLM"], "hidden_act": "silu"}


def _gemma1(fields: Fields, shapes: Shapes) -> dict[str, object]:
    values = _gemma(fields, shapes) | {"architectures": ["GemmaForCausalLM"]}
    return values | {"query_pre_attn_scalar": None, "sliding_window": None}


def _gemma2(fields: Fields, shapes: Shapes) -> dict[str, object]:
    return _gemma(fields, shapes) | {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": fields.get("attn_logit_softcapping"),
    }


def _gemma3(fields: Fields, shapes: Shapes) -> dict[str, object]:
    rope = {"rope_type": "default", "rope_theta": _rope(fields)["rope_theta"]}
    values = _gemma(fields, shapes) | {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None}
    return values | {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}


def _gemma(fields: Fields, shapes: Shapes) -> dict[str, object]:
    """Levanter's Gemma has no sliding windows, and scales by the head size; the rest is Gemma's."""
    fields.require(SUPPORTED_VALUES)
    _require_activation(fields, GELU_TANH)
    if "rope_type" in _rope(fields):
        raise fields.refused("rope")
    values = _common(fields, shapes)
    return values | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": values["head_dim"],
        "final_logit_softcapping": None,
        "sliding_window": fields.integer("max_seq_len", 8192),
        "layer_types": ["full_attention"] * fields.integer("num_layers"),
    }


def _gpt2(fields: Fields, shapes: Shapes) -> dict[str, object]:
    fields.require(SUPPORTED_VALUES | {"use_bias": (True, None)})
    _require_activation(fields, GELU_TANH)
    hidden_size = fields.integer("hidden_dim")
    return _tied(shapes) | {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": shapes["wte.weight"][0],
        "n_positions": fields.integer("max_seq_len"),
        "n_embd": hidden_size,
        "n_layer": fields.integer("num_layers"),
        "n_head": fields.integer("num_heads"),
        "n_inner": hidden_size * fields.integer("mlp_scale"),
        "layer_norm_epsilon": fields.number("layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _common(fields: Fields, shapes: Shapes) -> dict[str, object]:
    # From the shape [kv_head, head, embed], because some of Levanter's classes ignore their head_dim.
    head_dim = shapes["model.layers.0.self_attn.k_proj.weight"][-2]
    values: dict[str, object] = {
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "hidden_size": fields.integer("hidden_dim"),
        "intermediate_size": fields.integer("intermediate_dim"),
        "num_hidden_layers": fields.integer("num_layers"),
        "num_attention_heads": fields.integer("num_heads"),
        "num_key_value_heads": fields.integer("num_kv_heads"),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("layer_norm_epsilon"),
        "max_position_embeddings": fields.integer("max_seq_len"),
    }
    return values | _tied(shapes) | _rope(fields)


def _rope(fields: Fields) -> dict[str, object]:
    """The rotary keys in Hugging Face's older form; configs older than `rope` have a rope_theta instead."""
    rope = fields.mapping("rope")
    kind = rope.get("type") or "default"
    if kind == "llama3":
        given = {key: rope.values[key] for key in LLAMA3 if rope.has(key)}
        scaling = LLAMA3 | given | {"rope_type": "llama3"}
        return {"rope_theta": rope.number("theta", 500_000.0), "rope_scaling": scaling}
    rope.require({"type": ("default", "linear", None), "factor": (1.0, 1, None)})
    fields.require({"rope_scaling": (None,)})
    return {"rope_theta": rope.number("theta", fields.number("rope_theta", 10_000.0))}


def _tied(shapes: Shapes) -> dict[str, object]:
    return {"tie_word_embeddings": "lm_head.weight" not in shapes}


def _require_activation(fields: Fields, names: tuple[str, ...]) -> None:
    fields.require({"activation_function": (*names, None)})


TRANSLATIONS: dict[str, Callable[[Fields, Shapes], dict[str, object]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen": _llama,
    "qwen3": _llama,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
}
