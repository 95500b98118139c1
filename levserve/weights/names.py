"""The one table of tensor names: levserve's arrays, and the tensors that fill them in each checkpoint format.

A fused array (`qkv`, `gate_up`) is filled by several tensors, each taking its own rows. `expected_tensors` turns the table
into what one checkpoint must hold; `match_tensors` compares that with what it does hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from levserve.errors import StartupError
from levserve.model.config import ModelConfig, parameter_shapes

MAX_NAMES_IN_MESSAGE = 8
ROPE_FACTORS = "rope_freqs.weight"  # GGUF's form of Llama 3's rotary scaling; read with the configuration
# Tensors a checkpoint may hold without us reading them: rotary frequencies, and a head that is tied to the embedding.
HARMLESS = re.compile(rf".*\.rotary_emb\.inv_freq|lm_head\.weight|{re.escape(ROPE_FACTORS)}")


class Format(StrEnum):
    HUGGING_FACE = "hf"
    GGUF = "gguf"


class Part(StrEnum):
    """Which rows of its array a tensor fills."""

    ALL = "all"
    Q = "q"
    K = "k"
    V = "v"
    GATE = "gate"
    UP = "up"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `{}` stands for the layer."""

    array: str
    part: Part
    hf: str
    gguf: str


# fmt: off
TABLE = (
    Row("embed",                 Part.ALL,  "model.embed_tokens.weight",                         "token_embd.weight"),
    Row("layers.{}.input_norm",  Part.ALL,  "model.layers.{}.input_layernorm.weight",            "blk.{}.attn_norm.weight"),
    Row("layers.{}.qkv",         Part.Q,    "model.layers.{}.self_attn.q_proj.weight",           "blk.{}.attn_q.weight"),
    Row("layers.{}.qkv",         Part.K,    "model.layers.{}.self_attn.k_proj.weight",           "blk.{}.attn_k.weight"),
    Row("layers.{}.qkv",         Part.V,    "model.layers.{}.self_attn.v_proj.weight",           "blk.{}.attn_v.weight"),
    Row("layers.{}.qkv_bias",    Part.Q,    "model.layers.{}.self_attn.q_proj.bias",             "blk.{}.attn_q.bias"),
    Row("layers.{}.qkv_bias",    Part.K,    "model.layers.{}.self_attn.k_proj.bias",             "blk.{}.attn_k.bias"),
    Row("layers.{}.qkv_bias",    Part.V,    "model.layers.{}.self_attn.v_proj.bias",             "blk.{}.attn_v.bias"),
    Row("layers.{}.q_norm",      Part.ALL,  "model.layers.{}.self_attn.q_norm.weight",           "blk.{}.attn_q_norm.weight"),
    Row("layers.{}.k_norm",      Part.ALL,  "model.layers.{}.self_attn.k_norm.weight",           "blk.{}.attn_k_norm.weight"),
    Row("layers.{}.out",         Part.ALL,  "model.layers.{}.self_attn.o_proj.weight",           "blk.{}.attn_output.weight"),
    Row("layers.{}.out_bias",    Part.ALL,  "model.layers.{}.self_attn.o_proj.bias",             "blk.{}.attn_output.bias"),
    Row("layers.{}.mlp_norm",    Part.ALL,  "model.layers.{}.post_attention_layernorm.weight",   "blk.{}.ffn_norm.weight"),
    Row("layers.{}.gate_up",     Part.GATE, "model.layers.{}.mlp.gate_proj.weight",              "blk.{}.ffn_gate.weight"),
    Row("layers.{}.gate_up",     Part.UP,   "model.layers.{}.mlp.up_proj.weight",                "blk.{}.ffn_up.weight"),
    Row("layers.{}.down",        Part.ALL,  "model.layers.{}.mlp.down_proj.weight",              "blk.{}.ffn_down.weight"),
    Row("final_norm",            Part.ALL,  "model.norm.weight",                                 "output_norm.weight"),
    Row("head",                  Part.ALL,  "lm_head.weight",                                    "output.weight"),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Target:
    """Where one tensor of a checkpoint goes: rows `start` to `stop` of a levserve array; `shape` is the tensor's own."""

    array: str
    start: int
    stop: int
    shape: tuple[int, ...]


def expected_tensors(config: ModelConfig, file_format: Format) -> dict[str, Target]:
    """Every tensor a checkpoint of this model holds, by its name in the file."""
    shapes = parameter_shapes(config)
    targets: dict[str, Target] = {}
    for row in TABLE:
        name = row.hf if file_format is Format.HUGGING_FACE else row.gguf
        for layer in range(config.num_layers if "{}" in name else 1):
            array = row.array.format(layer)
            if array in shapes:
                targets[name.format(layer)] = _target(array, shapes[array], row.part, config)
    return targets


def match_tensors(source: str, found: Mapping[str, tuple[int, ...]], targets: Mapping[str, Target]) -> None:
    """Refuses a checkpoint whose tensors are not exactly the expected ones, harmless ones aside."""
    missing = [name for name in targets if name not in found]
    extra = [name for name in found if name not in targets and not HARMLESS.fullmatch(name)]
    misshapen = [
        f"{name} is {list(found[name])}, expected {list(target.shape)}"
        for name, target in targets.items()
        if name in found and found[name] != target.shape
    ]
    problems = [
        f"{kind} {_listed(names)}"
        for kind, names in (("missing", missing), ("unexpected", extra), ("wrong shape:", misshapen))
        if names
    ]
    if problems:
        raise StartupError(f"{source}: the tensors do not fit the model's configuration: {'; '.join(problems)}")


def _target(array: str, shape: tuple[int, ...], part: Part, config: ModelConfig) -> Target:
    start, num_rows = _rows(part, shape[0], config)
    return Target(array, start, start + num_rows, (num_rows, *shape[1:]))


def _rows(part: Part, num_rows: int, config: ModelConfig) -> tuple[int, int]:
    """First row and number of rows of a part."""
    q, kv, mlp = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    return {
        Part.ALL: (0, num_rows),
        Part.Q: (0, q),
        Part.K: (q, kv),
        Part.V: (q + kv, kv),
        Part.GATE: (0, mlp),
        Part.UP: (mlp, mlp),
    }[part]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_IN_MESSAGE])
    hidden = len(names) - MAX_NAMES_IN_MESSAGE
    return f"{shown} and {hidden} more" if hidden > 0 else shown
