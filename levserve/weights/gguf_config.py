"""Turns the metadata of a GGUF file into a `ModelConfig`, or names the key and value that it cannot serve.

Unknown keys under the architecture's prefix are refused, because llama.cpp stores there only what changes the
forward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.gguf.header import GGUFHeader, Value, read_header, shortest
from levserve.model.config import (
    Activation,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
)
from levserve.weights.config_fields import Extras, Fields
from levserve.weights.families import FAMILIES
from levserve.weights.family_readers import every_layer, gemma2_layers
from levserve.weights.gguf_latent import KEYS, head_size, read_deepseek
from levserve.weights.gguf_mixtures import (
    DEEPSEEK,
    EXPERTS,
    SHARED,
    num_layers,
    read_experts,
    read_glm4_moe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from levserve.weights.rope_scaling import long_attention_factor, scaled_context, yarn_attention_factor
from levserve.weights.tensor_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

# Keys that change the forward pass, each with the values that levserve supports.
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
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
)
YARN_KEYS = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
# The file holds only the factors computed from these values, which Llama 3.1 and 3.2 have in common.
LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR, LLAMA3_ORIGINAL_CONTEXT = 1.0, 4.0, 8192
# These two scale attention scores differently. Their files do not say so; llama.cpp goes by the layer count.
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
# Files do not contain this value either; all published models have it.
GPT_OSS_GATE_LIMIT = 7.0


def _listed_layers(fields: Fields, num_layers: int, *, period: int) -> list[bool]:
    """Which layers have a window: those that the file lists, or all but the last of each period."""
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return list(map(bool, pattern))
    period = fields.integer("attention.sliding_window_pattern", period)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _olmo(fields: Fields) -> Extras:
    """OLMo 2, and OLMo 3, whose layers with a window have no rotary scaling."""
    if not fields.has("attention.sliding_window"):
        return {}
    return {"local_rope_theta": fields.number("rope.freq_base", 10_000.0)}


def _granite(fields: Fields) -> Extras:
    return {
        "embed_scale": shortest(fields.number("embedding_scale", 1.0)),
        "attention_scale": shortest(fields.number("attention.scale", 1.0)),
        "residual_scale": shortest(fields.number("residual_scale", 1.0)),
        "logit_scale": 1 / shortest(fields.number("logit_scale", 1.0)),
    }


def _gpt_neox(fields: Fields) -> Extras:
    return {
        "is_parallel": fields.flag("use_parallel_residual", True),
        "activation": Activation.GELU,
        "qkv_bias": True,
        "out_bias": True,
    }


def _gemma(fields: Fields) -> Extras:
    return {"embed_scale": math.sqrt(fields.integer("embedding_length"))}


def _gemma2(fields: Fields, layers_of_27b: int) -> Extras:
    scale_dim = _head_dim(fields)
    if fields.integer("block_count") == layers_of_27b:
        scale_dim = fields.integer("embedding_length") // _uniform(fields, "attention.head_count")
    return _gemma(fields) | {
        "attention_scale": scale_dim**-0.5,
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }


def _gemma3(fields: Fields) -> Extras:
    return _gemma2(fields, GEMMA3_27B_LAYERS) | {
        "local_rope_theta": fields.number("rope.freq_base_swa", 10_000.0)
    }


def _gpt_oss(fields: Fields) -> Extras:
    return read_qwen3_moe(fields) | {"gate_limit": GPT_OSS_GATE_LIMIT}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp stores a family. `family` is its key in `FAMILIES`; only its files may have `keys`."""

    family: str
    read: Callable[[Fields], Extras] = lambda fields: {}
    slides: Callable[[Fields, int], list[bool]] | None = None
    keys: tuple[str, ...] = ()
    has_truncated_yarn: bool = True
    """Whether the models were trained with `YarnScaling.truncates`; files do not say."""
    is_latent: bool = False
    """Whether heads are expanded from short vectors, as in DeepSeek's attention."""
    may_have_qk_norm: bool = False
    """Whether some models have norms of queries and keys, and others do not."""


SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", read_experts, keys=EXPERTS),  # also Mistral and Mixtral
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", read_qwen3_moe, keys=EXPERTS),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", read_qwen2_moe, keys=SHARED),
    "glm4moe": Architecture("Glm4MoeForCausalLM", read_glm4_moe, keys=DEEPSEEK, may_have_qk_norm=True),
    "deepseek2": Architecture("DeepseekV3ForCausalLM", read_deepseek, keys=KEYS, is_latent=True),
    "gpt-oss": Architecture("GptOssForCausalLM", _gpt_oss, gemma2_layers, EXPERTS, has_truncated_yarn=False),
    "gemma": Architecture("GemmaForCausalLM", _gemma),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", lambda fields: _gemma2(fields, GEMMA2_27B_LAYERS), gemma2_layers, SOFTCAPS
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _gemma3,
        functools.partial(_listed_layers, period=6),
        (*SOFTCAPS, "rope.freq_base_swa", "attention.sliding_window_pattern"),
    ),
    "phi3": Architecture("Phi3ForCausalLM", slides=every_layer, keys=("rope.scaling.attn_factor",)),
    "phi2": Architecture("PhiForCausalLM", keys=("attention.layer_norm_epsilon",)),
    "olmo2": Architecture(  # also OLMo 3
        "Olmo2ForCausalLM",
        _olmo,
        functools.partial(_listed_layers, period=4),
        ("attention.sliding_window_pattern",),
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        _granite,
        keys=("embedding_scale", "attention.scale", "residual_scale", "logit_scale"),
    ),
    "command-r": Architecture(
        "CohereForCausalLM",
        lambda fields: {"logit_scale": shortest(fields.number("logit_scale", 1.0))},
        keys=("attention.layer_norm_epsilon", "logit_scale"),
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM", _gpt_neox, keys=("attention.layer_norm_epsilon", "use_parallel_residual")
    ),
    "gpt2": Architecture("GPT2LMHeadModel", keys=("attention.layer_norm_epsilon",)),
}


def read_gguf_config(path: Path) -> ModelConfig:
    header = read_header(path)
    name = _architecture_name(path, header)
    architecture = ARCHITECTURES[name]
    fields = _architecture_fields(path, header, name)
    num_heads = _uniform(fields, "attention.head_count")
    count = num_layers(fields)
    head_dim = head_size(fields) if architecture.is_latent else _head_dim(fields)
    if not architecture.is_latent:
        fields.require({"attention.value_length": (head_dim,)})
    always = FAMILIES[architecture.family].always
    norm = "layer_norm" if always.get("has_layer_norms") else "layer_norm_rms"
    shape: Extras = {
        "vocab_size": _vocab_size(fields, header),
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": _uniform(fields, "feed_forward_length"),
        "num_layers": count,
        "num_heads": num_heads,
        "num_kv_heads": _uniform(fields, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "norm_eps": shortest(fields.number(f"attention.{norm}_epsilon")),
        "max_position": fields.integer("context_length"),
        "tied_head": "output.weight" not in header.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in header.tensors,
        "out_bias": "blk.0.attn_output.bias" in header.tensors,
        "windows": _windows(fields, architecture, count),
    }
    if architecture.may_have_qk_norm:
        shape["qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors
    if "rope_theta" not in always:
        shape |= _rope(path, header, head_dim, fields, architecture)
        shape["max_position"] = scaled_context(shape["rope_scaling"], shape["max_position"])
    return ModelConfig(**shape | always | architecture.read(fields))


def _architecture_name(path: Path, header: GGUFHeader) -> str:
    name = header.metadata.get("general.architecture")
    if isinstance(name, str) and name in ARCHITECTURES:
        return name
    supported = ", ".join(ARCHITECTURES)
    raise StartupError(f"{path}: general.architecture = {name!r} is not supported; supported are {supported}")


def _architecture_fields(path: Path, header: GGUFHeader, name: str) -> Fields:
    """The keys under the architecture's own prefix; refuses unknown keys and values that we cannot serve."""
    prefix, architecture = f"{name}.", ARCHITECTURES[name]
    own: dict[str, Value] = {}
    for key, value in header.metadata.items():
        if key.startswith(prefix):
            own[key.removeprefix(prefix)] = value
    fields = Fields(f"{path}: {name}", own)
    allowed = set(architecture.keys)
    if architecture.slides:
        allowed.add("attention.sliding_window")
    if own.get("rope.scaling.type") in ("linear", "yarn"):
        allowed |= {"rope.scaling.type", "rope.scaling.factor"}
    if own.get("rope.scaling.type") == "yarn":
        allowed |= {"rope.scaling.attn_factor", *YARN_KEYS}
    fields.require({key: values for key, values in SUPPORTED_VALUES.items() if key not in allowed})
    fields.require_known((*READ_KEYS, *SUPPORTED_VALUES, *allowed))
    return fields


def _head_dim(fields: Fields) -> int:
    default = fields.integer("embedding_length") // _uniform(fields, "attention.head_count")
    return fields.integer("attention.key_length", default)


def _uniform(fields: Fields, key: str, default: int | None = None) -> int:
    """A number that is given once or per layer; layers that differ are refused."""
    value = fields.get(key)
    if not isinstance(value, list):
        return fields.integer(key, default)
    if len(set(value)) != 1:
        raise fields.refused(key)
    return Fields(fields.source, {key: value[0]}).integer(key)


def _vocab_size(fields: Fields, header: GGUFHeader) -> int:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else fields.integer("vocab_size")


def _windows(fields: Fields, architecture: Architecture, count: int) -> tuple[int | None, ...]:
    window = fields.integer("attention.sliding_window", 0, minimum=0) if architecture.slides else 0
    if architecture.slides is None or not window:
        return ()
    slides = architecture.slides(fields, count)
    if len(slides) != count:
        raise fields.refused("attention.sliding_window_pattern")
    return tuple(window if slide else None for slide in slides)


def _rope(
    path: Path, header: GGUFHeader, head_dim: int, fields: Fields, architecture: Architecture
) -> Extras:
    theta = fields.number("rope.freq_base", 10_000.0)
    size = fields.integer("rope.dimension_count", head_dim)
    if architecture.is_latent:
        head_dim = size
    if size != head_dim and "partial_rotary_factor" not in FAMILIES[architecture.family].supported:
        raise fields.refused("rope.dimension_count")
    scaling = _long_scaling(path, header, size, fields)
    if scaling is None:
        scaling = _llama3_scaling(path, header, head_dim, theta, fields)
    if scaling is None and fields.get("rope.scaling.type") == "linear":
        scaling = LinearScaling(fields.number("rope.scaling.factor"))
    if scaling is None and fields.get("rope.scaling.type") == "yarn":
        scaling = _yarn_scaling(fields, truncates=architecture.has_truncated_yarn)
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_size": None if size == head_dim else size}


def _long_scaling(path: Path, header: GGUFHeader, size: int, fields: Fields) -> RopeScaling | None:
    """Phi-3's scaling, whose factors are tensors in the file."""
    entries = [header.tensors.get(name) for name in (SHORT_FACTORS, LONG_FACTORS)]
    found = [tuple(np.frombuffer(entry.data, np.float32).tolist()) for entry in entries if entry is not None]
    if not found:
        return None
    if [len(factors) for factors in found] != [size // 2] * 2:
        raise StartupError(f"{path}: {SHORT_FACTORS} and {LONG_FACTORS} must have {size // 2} numbers each")
    original = fields.integer("rope.scaling.original_context_length")
    attention_factor = long_attention_factor(fields.integer("context_length") / original, original)
    short, long = found
    return LongScaling(short, long, original, fields.number("rope.scaling.attn_factor", attention_factor))


def _yarn_scaling(fields: Fields, *, truncates: bool) -> RopeScaling:
    factor = shortest(fields.number("rope.scaling.factor"))
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    # llama.cpp multiplies YaRN's own factor by this one.
    further = shortest(fields.number("rope.scaling.attn_factor", 1.0))
    return YarnScaling(
        factor,
        original,
        yarn_attention_factor(factor) * further,
        beta_fast=shortest(fields.number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=shortest(fields.number("rope.scaling.yarn_beta_slow", 1.0)),
        truncates=truncates,
    )


def _llama3_scaling(
    path: Path, header: GGUFHeader, head_dim: int, rope_theta: float, fields: Fields
) -> RopeScaling | None:
    """Llama 3's scaling, recognised by the factors that the file holds; any other factors are refused."""
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
        problem = f"{ROPE_FACTORS} does not follow Llama 3's rotary scaling"
        raise StartupError(f"{path}: {problem}; other factors are not supported")
    return scaling


def llama3_factors(scaling: Llama3Scaling, head_dim: int, rope_theta: float) -> NDArray[np.float64]:
    """The factor by which each rotary frequency is divided, as llama.cpp's converter computes it."""
    wavelengths = 2 * math.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position / wavelengths - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling.factor + smooth))
