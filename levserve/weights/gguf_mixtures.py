"""Reads the metadata of a GGUF file that describes a mixture of experts."""

from __future__ import annotations

from levserve.gguf.header import shortest
from levserve.model.config import Routing, Scoring
from levserve.weights.config_fields import Extras, Fields

EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
SHARED = (*EXPERTS, "expert_shared_feed_forward_length", "leading_dense_block_count")
DEEPSEEK = (
    *EXPERTS,
    "expert_shared_count",
    "leading_dense_block_count",
    "expert_gating_func",
    "expert_weights_scale",
    "expert_weights_norm",
    "expert_group_count",
    "expert_group_used_count",
    "nextn_predict_layers",
)
"""The keys of DeepSeek's form, which GLM-4.5 has too."""
UNSET, SOFTMAX, SIGMOID = 0, 1, 2
"""llama.cpp's numbers for how a router's scores become weights."""


def read_experts(fields: Fields) -> Extras:
    """For families that may have none."""
    count = fields.integer("expert_count", 0, minimum=0)
    return {"num_experts": count, "experts_per_token": fields.integer("expert_used_count")} if count else {}


def read_qwen3_moe(fields: Fields) -> Extras:
    return read_experts(fields) | {"intermediate_size": fields.integer("expert_feed_forward_length")}


def read_qwen2_moe(fields: Fields) -> Extras:
    return read_qwen3_moe(fields) | {
        "routing": Routing(renormalises=False),
        "shared_size": fields.integer("expert_shared_feed_forward_length"),
        **_dense(fields),
    }


def read_glm4_moe(fields: Fields) -> Extras:
    fields.require({"expert_gating_func": (SIGMOID, UNSET, None)})
    return read_deepseek_experts(fields, Scoring.SIGMOID)


def read_deepseek_experts(fields: Fields, scoring: Scoring) -> Extras:
    num_groups = fields.integer("expert_group_count", 1)
    scale = fields.get("expert_weights_scale")
    has_correction = scoring is Scoring.SIGMOID
    routing = Routing(
        renormalises=fields.flag("expert_weights_norm", False),
        scoring=scoring,
        has_correction=has_correction,
        num_groups=num_groups,
        groups_per_token=fields.integer("expert_group_used_count", 1),
        group_best=2 if has_correction else 1,
        scale=shortest(fields.number("expert_weights_scale")) if scale else 1.0,
    )
    width = fields.integer("expert_feed_forward_length")
    return read_qwen3_moe(fields) | {
        "routing": routing,
        "shared_size": width * fields.integer("expert_shared_count", minimum=0),
        **_dense(fields),
    }


def num_layers(fields: Fields) -> int:
    """The layers of the model itself, without those after it that draft tokens."""
    return fields.integer("block_count") - fields.integer("nextn_predict_layers", 0, minimum=0)


def _dense(fields: Fields) -> Extras:
    """The layers without experts, which come first."""
    count = fields.integer("leading_dense_block_count", 0, minimum=0)
    if not count:
        return {}
    layers = tuple(range(min(count, num_layers(fields))))
    return {"dense_layers": layers, "dense_size": fields.integer("feed_forward_length")}
