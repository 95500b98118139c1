"""Reads the fields of config.json that describe a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from levserve.model.config import Routing, Scoring
from levserve.weights.config_fields import Extras, Fields


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
    """DeepSeek-V3's form, which other families have adopted."""
    routing = Routing(
        renormalises=fields.flag("norm_topk_prob", True),
        scoring=Scoring.SIGMOID,
        has_correction=True,
        num_groups=fields.integer("n_group", 1),
        groups_per_token=fields.integer("topk_group", 1),
        group_best=2,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return _deepseek_experts(fields, routing)


def read_deepseek2_experts(fields: Fields) -> Extras:
    """DeepSeek-V2's form, with or without groups."""
    routing = Routing(renormalises=False, scale=fields.number("routed_scaling_factor", 1.0))
    if fields.get("topk_method") == "group_limited_greedy":
        groups = fields.integer("n_group"), fields.integer("topk_group")
        routing = replace(routing, num_groups=groups[0], groups_per_token=groups[1])
    return _deepseek_experts(fields, routing)


def _deepseek_experts(fields: Fields, routing: Routing) -> Extras:
    num_experts, per_token = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    group_size = num_experts // routing.num_groups
    if num_experts % routing.num_groups or group_size < routing.group_best:
        raise fields.refused("n_group")
    num_chosen = routing.groups_per_token
    if num_chosen > routing.num_groups or num_chosen * group_size < per_token:
        raise fields.refused("topk_group")
    width = fields.integer("moe_intermediate_size")
    num_dense = fields.integer("first_k_dense_replace", minimum=0)
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "routing": routing,
        "intermediate_size": width,
        "shared_size": width * fields.integer("n_shared_experts", minimum=0),
        **_dense(fields, range(min(num_dense, fields.integer("num_hidden_layers")))),
    }


def _qwen_dense_layers(fields: Fields) -> list[int]:
    step, listed = fields.integer("decoder_sparse_step", 1), fields.layers("mlp_only_layers")
    layers = range(fields.integer("num_hidden_layers"))
    return [layer for layer in layers if (layer + 1) % step or layer in listed]


def _dense(fields: Fields, layers: Sequence[int]) -> Extras:
    """The config's fields for the layers that have no experts."""
    if not layers:
        return {}
    return {"dense_layers": tuple(layers), "dense_size": fields.integer("intermediate_size")}
