"""Turns a Hugging Face config.json into a `ModelConfig`, or names the key and value that it cannot serve.

It reads what transformers 5 writes (`rope_parameters`) and the older form (`rope_theta` and `rope_scaling`).
An absent key has the default of transformers. Keys that do not change the forward pass (token ids, dropout,
initializer_range, ...) are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path

from levserve.errors import StartupError, cause_of
from levserve.model.config import ModelConfig
from levserve.weights.config_fields import Extras, Fields
from levserve.weights.families import FAMILIES, Family
from levserve.weights.family_readers import every_layer, no_layer, qwen3_moe_layers
from levserve.weights.quantized.methods import KEYS, find_method
from levserve.weights.quantized.module import Method
from levserve.weights.rope_scaling import read_scaling, scaled_context

# Keys that change the forward pass, each with the values that levserve supports.
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

ORIGINAL = "original_max_position_embeddings"
"""Beside the rotary parameters, or among them."""
MAX_LAYERS = 10_000
"""Ten times as many as any model has: a list with an entry for each must fit the memory."""


def read_hf_config(path: Path) -> ModelConfig:
    """The model's configuration. Also refuses a checkpoint in a quantized format that cannot be read."""
    fields = _read_fields(path)
    find_method(fields)
    others = {key: value for key, value in fields.values.items() if key not in KEYS}
    return make_hf_config(Fields(fields.source, others))


def read_method(path: Path) -> Method | None:
    """How the checkpoint of this config.json is quantized; None if it is not."""
    return find_method(_read_fields(path))


def make_hf_config(written: Fields) -> ModelConfig:
    """The configuration that the keys of a config.json describe; Levanter's reader calls this too."""
    family = _family(written)
    if family.inside:
        written = _language_model(written, family.inside)
    fields = Fields(written.source, {**family.defaults, **written.values})
    supported = {**SUPPORTED_VALUES, **family.supported}
    fields.require({key: values for key, values in supported.items() if values is not None})
    hidden_size = fields.integer(family.key("hidden_size"))
    num_heads = fields.integer(family.key("num_attention_heads"))
    num_layers = fields.integer(family.key("num_hidden_layers"), maximum=MAX_LAYERS)
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
        shape |= _rope(fields, family, extras.get("rotary_size", head_dim), max_position)
        shape["max_position"] = scaled_context(shape["rope_scaling"], max_position)
    return ModelConfig(**shape | extras)


def _read_fields(path: Path) -> Fields:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {cause_of(error)}") from error
    if not isinstance(values, dict):
        raise StartupError(f"cannot read {path}: expected a JSON object")
    return Fields(str(path), values)


def _family(fields: Fields) -> Family:
    architectures = fields.get("architectures")
    if isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str):
        family = FAMILIES.get(architectures[0])
        if family is not None:
            return family
    given = "it names no architecture"
    if architectures:
        given = f"architectures = {architectures!r} is not supported"
    raise StartupError(f"{fields.source}: {given}; supported are {', '.join(FAMILIES)}")


def _language_model(written: Fields, inside: str) -> Fields:
    """The configuration of the part that reads text. The head is the whole model's, which may tie it."""
    key, text = "tie_word_embeddings", written.mapping(inside)
    return Fields(text.source, {**text.values, key: written.get(key)}) if written.has(key) else text


def _rope(fields: Fields, family: Family, size: int, max_position: int) -> Extras:
    """Reads the rotary positions of heads whose rotary part has `size` dimensions, if it is not a portion.

    If both forms are present both are checked, and the older one counts, as in transformers.
    """
    newer, older = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if family.has_local_rope and newer.has("full_attention"):
        newer.require_known(("full_attention", "sliding_attention"))
        newer = newer.mapping("full_attention")
    if "partial_rotary_factor" not in family.supported:
        for rope in (newer, older):
            rope.require({"partial_rotary_factor": (1.0, None)})

    def number(key: str, default: float) -> float:
        return older.number(key, newer.number(key, fields.number(family.key(key), default)))

    rotary_size = int(size * number("partial_rotary_factor", 1.0))
    original = fields.integer(ORIGINAL, max_position)
    if fields.get(ORIGINAL) is not None:
        for rope in (newer, older):
            rope.require({ORIGINAL: (original, None)})
    scalings = [read_scaling(rope, max_position, original, rotary_size) for rope in (newer, older)]
    return {
        "rope_theta": number("rope_theta", 10_000.0),
        "rope_scaling": scalings[bool(older.values)],
        "rotary_size": None if rotary_size == size else rotary_size,
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
        is_free = family.slides not in (no_layer, every_layer, qwen3_moe_layers)
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
