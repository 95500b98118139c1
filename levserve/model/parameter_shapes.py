"""The arrays of a decoder: the name and shape of each, which follow from its config."""

from __future__ import annotations

from levserve.model.config import Latent, ModelConfig


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every array of the model by its levserve name; matrices are [out, in], those of experts [expert, out,
    in].

    `qkv` stacks q, k and v rows in that order; `gate_up` stacks gate then up (up alone where nothing is
    gated). This is the seam between `weights/`, which fills these arrays, and `Decoder.from_arrays`, which
    arranges them.
    """
    embed, vocab = config.hidden_size, config.vocab_rows
    norms = ("norm", "norm_bias") if config.has_layer_norms and config.has_norm_biases else ("norm",)
    layer: dict[str, tuple[int, ...]] = {}
    if config.has_pre_norms:
        places = ("input",) if config.shares_norm else ("input", "mlp")
        layer |= {f"{place}_{norm}": (embed,) for place in places for norm in norms}
    if config.has_post_norms:
        layer |= {f"{place}_post_{norm}": (embed,) for place in ("attention", "mlp") for norm in norms}
    layer |= _latent_shapes(config, config.latent) if config.latent else {"qkv": (config.QKV.size, embed)}
    layer["out"] = (embed, config.Mixed.size)
    if config.qkv_bias and config.latent is None:
        layer["qkv_bias"] = (config.QKV.size,)
    if config.out_bias:
        layer["out_bias"] = (embed,)
    if config.qk_norm:
        num_q, num_k = (config.num_heads, config.num_kv_heads) if config.qk_norm_spans_heads else (1, 1)
        layer |= {"q_norm": (num_q * config.head_dim,), "k_norm": (num_k * config.head_dim,)}
    if config.has_sinks:
        layer["sinks"] = (config.num_heads,)

    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, embed)}
    if config.has_position_table:
        shapes["positions"] = (config.max_position, embed)
    for index in range(config.num_layers):
        fed = _mixture_shapes(config) if config.is_mixture(index) else _dense_shapes(config)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in (layer | fed).items()}
    shapes |= {f"final_{norm}": (embed,) for norm in norms}
    if not config.tied_head:
        shapes["head"] = (vocab, embed)
    if config.head_bias:
        shapes["head_bias"] = (vocab,)
    return shapes


def _latent_shapes(config: ModelConfig, latent: Latent) -> dict[str, tuple[int, ...]]:
    embed, num_heads, rank = config.hidden_size, config.num_heads, latent.kv_rank
    expanded = config.head_dim - latent.rotary_size + latent.value_size
    shapes: dict[str, tuple[int, ...]] = {}
    if latent.query_rank is not None:
        shapes |= {"q_down": (latent.query_rank, embed), "q_down_norm": (latent.query_rank,)}
    return shapes | {
        "q": (num_heads * config.head_dim, latent.query_rank or embed),
        "kv_down": (rank + latent.rotary_size, embed),
        "kv_down_norm": (rank,),
        "kv_up": (num_heads * expanded, rank),
    }


def _dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    embed, width = config.hidden_size, config.dense_width
    rows = config.gate_up(width).size
    shapes: dict[str, tuple[int, ...]] = {"gate_up": (rows, embed), "down": (embed, width)}
    if config.mlp_bias:
        shapes |= {"gate_up_bias": (rows,), "down_bias": (embed,)}
    return shapes


def _mixture_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    embed, count, shared = config.hidden_size, config.num_experts, config.shared_size
    rows = config.GateUp.size
    shapes: dict[str, tuple[int, ...]] = {
        "router": (count, embed),
        "experts_gate_up": (count, rows, embed),
        "experts_down": (count, embed, config.intermediate_size),
    }
    if config.router_bias:
        shapes["router_bias"] = (count,)
    if config.routing.has_correction:
        shapes["router_correction"] = (count,)
    if config.mlp_bias:
        shapes |= {"experts_gate_up_bias": (count, rows), "experts_down_bias": (count, embed)}
    if shared:
        shapes |= {"shared_gate_up": (config.gate_up(shared).size, embed), "shared_down": (embed, shared)}
    if config.has_shared_gate:
        shapes["shared_gate"] = (1, embed)
    return shapes
