"""Reads what the config.json of a mixture of experts says about them."""

from __future__ import annotations

from collections.abc import Sequence

from levserve.model.config import Routing, Scoring
from levserve.weights.config_fields import Extras, Fields

GROUP_BEST = 2
"""Experts whose weights rank a group in DeepSeek-V3."""


def read_mixtral_experts(fields: Fields) -> Extras:
    return {
        "num_experts": fields.integer("num_local_experts"),
        "experts_per_token": fields.integer("num_experts_per_tok"),
    }


def read_qwen_experts(fields: Fields) -> Extras:
    key = "num_experts" if fields.has("num_experts") else "num_local_experts"  # as transformers 5 writes it
    return {
        "num_experts": fields.integer(key),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "routing": Routing(renormalises=fields.flag("norm_topk_prob", False)),
        "intermediate_size": fields.integer("moe_intermediate_size"),
        **_dense(fields, _qwen_dense_layers(fields)),
    }


def read_deepseek_experts(fields: Fields) -> Extras:
    """DeepSeek-V3's form, which others have taken over."""
    num_experts, num_groups = fields.integer("n_routed_experts"), fields.integer("n_group", 1)
    groups_per_token, per_token = fields.integer("topk_group", 1), fields.integer("num_experts_per_tok")
    group_size = num_experts // num_groups
    if num_experts % num_groups or group_size < GROUP_BEST:
        raise fields.refused("n_group")
    if groups_per_token > num_groups or groups_per_token * group_size < per_token:
        raise fields.refused("topk_group")
    width = fields.integer("moe_intermediate_size")
    num_dense = fields.integer("first_k_dense_replace", 1, minimum=0)
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "routing": Routing(
            renormalises=fields.flag("norm_topk_prob", True),
            scoring=Scoring.SIGMOID,
            has_correction=True,
            num_groups=num_groups,
            groups_per_token=groups_per_token,
            group_best=GROUP_BEST,
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        "intermediate_size": width,
        "shared_size": width * fields.integer("n_shared_experts", 1, minimum=0),
        **_dense(fields, range(min(num_dense, fields.integer("num_hidden_layers")))),
    }


def _qwen_dense_layers(fields: Fields) -> list[int]:
    step, listed = fields.integer("decoder_sparse_step", 1), fields.layers("mlp_only_layers")
    layers = range(fields.integer("num_hidden_layers"))
    return [layer for layer in layers if (layer + 1) % step or layer in listed]


def _dense(fields: Fields, layers: Sequence[int]) -> Extras:
    """The layers that have no experts."""
    if not layers:
        return {}
    return {"dense_layers": tuple(layers), "dense_size": fields.integer("intermediate_size")}
