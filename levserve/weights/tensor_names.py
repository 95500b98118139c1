"""The table of tensor names: levserve's arrays, and the tensors that fill them in each checkpoint format.

A fused array (`qkv`, `gate_up`) may be filled by several tensors, each with rows of its own. Where families
name or split an array differently the table has several lines for it, and the tensors in the checkpoint
decide which one applies. `find_targets` lists what a checkpoint must hold; `match_tensors` compares that with
what it holds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from levserve.errors import StartupError
from levserve.model.config import ModelConfig
from levserve.model.parameter_shapes import parameter_shapes

MAX_NAMES_IN_MESSAGE = 8
# The tensors with the rotary scaling of Llama 3 and Phi-3 in GGUF files; read with the configuration.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# Tensors that are ignored: rotary frequencies, and a head that is tied to the embedding.
IGNORED = re.compile(
    r".*\.rotary_emb\.inv_freq|lm_head\.weight|rope_freqs\.weight|rope_factors_(long|short)\.weight"
)
# A layer after the last one, which drafts the token after the next, is ignored. Only it has this tensor.
DRAFTING = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight|(blk\.\d+\.)nextn\.eh_proj\.weight")
# GPT-2 stores its matrices [in, out].
TRANSPOSED = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
# GPT-NeoX stores query, key and value of one head after the other.
BY_HEAD = re.compile(r"gpt_neox\.layers\.\d+\.attention\.query_key_value\.(weight|bias)")


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


PARTS = {2: (Part.GATE, Part.UP), 3: (Part.Q, Part.K, Part.V)}


class Tensor(NamedTuple):
    """One tensor that a line of the table names."""

    name: str
    part: Part
    layer: int
    expert: int | None


class Line(NamedTuple):
    """One way to fill an array.

    In the name, `{}` is the layer, `{e}` the expert, and `[a|b]` lists the tensors that fill the parts, in
    order. Where the model has biases, the bias of `x.weight` is `x.bias`; it fills the array whose name has
    `_bias` at its end.
    """

    array: str
    name: str

    def parts(self) -> dict[Part, str]:
        choice = re.search(r"\[(.+)\]", self.name)
        if choice is None:
            return {Part.ALL: self.name}
        words = choice[1].split("|")
        return {part: self.name.replace(choice[0], word) for part, word in zip(PARTS[len(words)], words)}

    def with_biases(self) -> list[Line]:
        stem = self.name.removesuffix(".weight")
        return [self] if stem == self.name else [self, Line(f"{self.array}_bias", f"{stem}.bias")]

    def tensors(self, config: ModelConfig, layers: Iterable[int]) -> list[Tensor]:
        """The tensors of this line in these layers."""
        experts: Iterable[int | None] = range(config.num_experts) if "{e}" in self.name else [None]
        tensors = []
        for layer, expert, (part, name) in itertools.product(layers, experts, self.parts().items()):
            tensors.append(Tensor(name.format(layer, e=expert), part, layer, expert))
        return tensors


# A tensor fills the first of its arrays that the model has: "post_attention_layernorm" is a norm after
# attention in Gemma and OLMo 2, and the norm before the feed-forward part in Llama. fmt: off
TABLE: dict[Format, tuple[Line, ...]] = {
    Format.HUGGING_FACE: (
        Line("embed", "model.embed_tokens.weight"),
        Line("layers.{}.input_norm", "model.layers.{}.input_layernorm.weight"),
        Line("layers.{}.qkv", "model.layers.{}.self_attn.[q|k|v]_proj.weight"),
        Line("layers.{}.qkv", "model.layers.{}.self_attn.qkv_proj.weight"),
        Line("layers.{}.q_norm", "model.layers.{}.self_attn.q_norm.weight"),
        Line("layers.{}.k_norm", "model.layers.{}.self_attn.k_norm.weight"),
        Line("layers.{}.out", "model.layers.{}.self_attn.o_proj.weight"),
        Line("layers.{}.attention_post_norm", "model.layers.{}.post_attention_layernorm.weight"),
        Line("layers.{}.mlp_norm", "model.layers.{}.post_attention_layernorm.weight"),
        Line("layers.{}.mlp_norm", "model.layers.{}.pre_feedforward_layernorm.weight"),
        Line("layers.{}.mlp_post_norm", "model.layers.{}.post_feedforward_layernorm.weight"),
        Line("layers.{}.gate_up", "model.layers.{}.mlp.[gate|up]_proj.weight"),
        Line("layers.{}.gate_up", "model.layers.{}.mlp.gate_up_proj.weight"),
        Line("layers.{}.down", "model.layers.{}.mlp.down_proj.weight"),
        # Qwen3-MoE
        Line("layers.{}.router", "model.layers.{}.mlp.gate.weight"),
        Line("layers.{}.experts_gate_up", "model.layers.{}.mlp.experts.{e}.[gate|up]_proj.weight"),
        Line("layers.{}.experts_down", "model.layers.{}.mlp.experts.{e}.down_proj.weight"),
        # Qwen2-MoE
        Line("layers.{}.shared_gate_up", "model.layers.{}.mlp.shared_expert.[gate|up]_proj.weight"),
        Line("layers.{}.shared_down", "model.layers.{}.mlp.shared_expert.down_proj.weight"),
        Line("layers.{}.shared_gate", "model.layers.{}.mlp.shared_expert_gate.weight"),
        # GLM-4.5
        Line("layers.{}.router_correction", "model.layers.{}.mlp.gate.e_score_correction_bias"),
        Line("layers.{}.shared_gate_up", "model.layers.{}.mlp.shared_experts.[gate|up]_proj.weight"),
        Line("layers.{}.shared_down", "model.layers.{}.mlp.shared_experts.down_proj.weight"),
        # DeepSeek
        Line("layers.{}.q", "model.layers.{}.self_attn.q_proj.weight"),
        Line("layers.{}.q", "model.layers.{}.self_attn.q_b_proj.weight"),
        Line("layers.{}.q_down", "model.layers.{}.self_attn.q_a_proj.weight"),
        Line("layers.{}.q_down_norm", "model.layers.{}.self_attn.q_a_layernorm.weight"),
        Line("layers.{}.kv_down", "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight"),
        Line("layers.{}.kv_down_norm", "model.layers.{}.self_attn.kv_a_layernorm.weight"),
        Line("layers.{}.kv_up", "model.layers.{}.self_attn.kv_b_proj.weight"),
        # gpt-oss
        Line("layers.{}.sinks", "model.layers.{}.self_attn.sinks"),
        Line("layers.{}.router", "model.layers.{}.mlp.router.weight"),
        Line("layers.{}.experts_gate_up", "model.layers.{}.mlp.experts.gate_up_proj"),
        Line("layers.{}.experts_gate_up_bias", "model.layers.{}.mlp.experts.gate_up_proj_bias"),
        Line("layers.{}.experts_down", "model.layers.{}.mlp.experts.down_proj"),
        Line("layers.{}.experts_down_bias", "model.layers.{}.mlp.experts.down_proj_bias"),
        # Mixtral
        Line("layers.{}.router", "model.layers.{}.block_sparse_moe.gate.weight"),
        Line("layers.{}.experts_gate_up", "model.layers.{}.block_sparse_moe.experts.{e}.w[1|3].weight"),
        Line("layers.{}.experts_down", "model.layers.{}.block_sparse_moe.experts.{e}.w2.weight"),
        # Mixtral in Levanter's checkpoints, all experts in one tensor
        Line("layers.{}.experts_gate_up", "model.layers.{}.block_sparse_moe.experts.w[1|3].weight"),
        Line("layers.{}.experts_down", "model.layers.{}.block_sparse_moe.experts.w2.weight"),
        Line("final_norm", "model.norm.weight"),
        Line("head", "lm_head.weight"),
        # GPT-2
        Line("embed", "wte.weight"),
        Line("positions", "wpe.weight"),
        Line("layers.{}.input_norm", "h.{}.ln_1.weight"),
        Line("layers.{}.qkv", "h.{}.attn.c_attn.weight"),
        Line("layers.{}.out", "h.{}.attn.c_proj.weight"),
        Line("layers.{}.mlp_norm", "h.{}.ln_2.weight"),
        Line("layers.{}.gate_up", "h.{}.mlp.c_fc.weight"),
        Line("layers.{}.down", "h.{}.mlp.c_proj.weight"),
        Line("final_norm", "ln_f.weight"),
        # GPT-NeoX
        Line("embed", "gpt_neox.embed_in.weight"),
        Line("layers.{}.input_norm", "gpt_neox.layers.{}.input_layernorm.weight"),
        Line("layers.{}.qkv", "gpt_neox.layers.{}.attention.query_key_value.weight"),
        Line("layers.{}.out", "gpt_neox.layers.{}.attention.dense.weight"),
        Line("layers.{}.mlp_norm", "gpt_neox.layers.{}.post_attention_layernorm.weight"),
        Line("layers.{}.gate_up", "gpt_neox.layers.{}.mlp.dense_h_to_4h.weight"),
        Line("layers.{}.down", "gpt_neox.layers.{}.mlp.dense_4h_to_h.weight"),
        Line("final_norm", "gpt_neox.final_layer_norm.weight"),
        Line("head", "embed_out.weight"),
        # Phi-2
        Line("layers.{}.out", "model.layers.{}.self_attn.dense.weight"),
        Line("layers.{}.gate_up", "model.layers.{}.mlp.fc1.weight"),
        Line("layers.{}.down", "model.layers.{}.mlp.fc2.weight"),
        Line("final_norm", "model.final_layernorm.weight"),
    ),
    Format.GGUF: (
        Line("embed", "token_embd.weight"),
        Line("positions", "position_embd.weight"),
        Line("layers.{}.input_norm", "blk.{}.attn_norm.weight"),
        Line("layers.{}.qkv", "blk.{}.attn_[q|k|v].weight"),
        Line("layers.{}.qkv", "blk.{}.attn_qkv.weight"),
        Line("layers.{}.q", "blk.{}.attn_q.weight"),
        Line("layers.{}.q", "blk.{}.attn_q_b.weight"),
        Line("layers.{}.q_down", "blk.{}.attn_q_a.weight"),
        Line("layers.{}.q_down_norm", "blk.{}.attn_q_a_norm.weight"),
        Line("layers.{}.kv_down", "blk.{}.attn_kv_a_mqa.weight"),
        Line("layers.{}.kv_down_norm", "blk.{}.attn_kv_a_norm.weight"),
        Line("layers.{}.kv_up", "blk.{}.attn_kv_b.weight"),
        Line("layers.{}.q_norm", "blk.{}.attn_q_norm.weight"),
        Line("layers.{}.k_norm", "blk.{}.attn_k_norm.weight"),
        Line("layers.{}.out", "blk.{}.attn_output.weight"),
        Line("layers.{}.attention_post_norm", "blk.{}.post_attention_norm.weight"),
        Line("layers.{}.mlp_norm", "blk.{}.ffn_norm.weight"),
        Line("layers.{}.mlp_norm", "blk.{}.post_attention_norm.weight"),  # gpt-oss
        Line("layers.{}.mlp_post_norm", "blk.{}.post_ffw_norm.weight"),
        Line("layers.{}.router", "blk.{}.ffn_gate_inp.weight"),
        Line("layers.{}.gate_up", "blk.{}.ffn_[gate|up].weight"),
        Line("layers.{}.gate_up", "blk.{}.ffn_up.weight"),  # Phi-3, and GPT-2, which has no gate
        Line("layers.{}.experts_gate_up", "blk.{}.ffn_[gate|up]_exps.weight"),
        Line("layers.{}.experts_gate_up", "blk.{}.ffn_[gate|up].{e}.weight"),  # early files of Mixtral
        Line("layers.{}.shared_gate_up", "blk.{}.ffn_[gate|up]_shexp.weight"),
        Line("layers.{}.shared_down", "blk.{}.ffn_down_shexp.weight"),
        Line("layers.{}.shared_gate", "blk.{}.ffn_gate_inp_shexp.weight"),
        Line("layers.{}.router_correction", "blk.{}.exp_probs_b.bias"),
        Line("layers.{}.sinks", "blk.{}.attn_sinks.weight"),
        Line("layers.{}.down", "blk.{}.ffn_down.weight"),
        Line("layers.{}.experts_down", "blk.{}.ffn_down_exps.weight"),
        Line("layers.{}.experts_down", "blk.{}.ffn_down.{e}.weight"),
        Line("final_norm", "output_norm.weight"),
        Line("head", "output.weight"),
    ),
}
# fmt: on

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """Where one tensor of a checkpoint goes: `index` of a levserve array; `shape` is the tensor's own."""

    array: str
    index: Index
    shape: tuple[int, ...]


def find_targets(config: ModelConfig, file_format: Format, found: Collection[str]) -> dict[str, Target]:
    """The tensors that a checkpoint of this model must hold, by name; `found` are those that it does hold."""
    shapes = parameter_shapes(config)
    targets: dict[str, Target] = {}
    lines_of: dict[str, list[Line]] = {}
    layers_of: dict[str, list[int]] = {}
    for line in itertools.chain.from_iterable(line.with_biases() for line in TABLE[file_format]):
        layers = _layers_with(line.array, shapes, config)
        if layers and (config.is_gated or Part.GATE not in line.parts()):
            lines_of.setdefault(line.array, []).append(line)
            layers_of[line.array] = layers
    for array, lines in lines_of.items():
        ways = (line.tensors(config, layers_of[array]) for line in lines)
        for tensor in _choose_tensors(ways, found, targets):
            full_name = array.format(tensor.layer)
            targets[tensor.name] = _target(full_name, shapes[full_name], tensor, config)
    return targets


def match_tensors(source: str, found: Mapping[str, tuple[int, ...]], targets: Mapping[str, Target]) -> None:
    """Refuses a checkpoint whose tensors, except for ignored ones, are not exactly the expected ones."""
    missing = []
    misshapen = []
    for name, target in targets.items():
        if name not in found:
            missing.append(name)
        elif found[name] != target.shape:
            misshapen.append(f"{name} is {list(found[name])}, expected {list(target.shape)}")
    drafting = tuple(match[1] or match[2] for match in map(DRAFTING.fullmatch, found) if match)
    others = [name for name in found if name not in targets and not name.startswith(drafting)]
    extra = [name for name in others if not IGNORED.fullmatch(name)]
    problems = []
    for problem, names in (("missing", missing), ("unexpected", extra), ("wrong shape:", misshapen)):
        if names:
            problems.append(f"{problem} {_listed(names)}")
    if problems:
        raise StartupError(
            f"{source}: the tensors do not match the model's configuration: {'; '.join(problems)}"
        )


def _layers_with(array: str, shapes: Collection[str], config: ModelConfig) -> list[int]:
    """The layers that have an array of this name; [0] for an array outside the layers."""
    if "{}" not in array:
        return [0] if array in shapes else []
    return [layer for layer in range(config.num_layers) if array.format(layer) in shapes]


def _choose_tensors(
    ways: Iterable[list[Tensor]], found: Collection[str], taken: Collection[str]
) -> list[Tensor]:
    """The tensors of the line that the checkpoint follows in at least one layer, else of the first line."""
    first: list[Tensor] | None = None
    for tensors in ways:
        if any(tensor.name in taken for tensor in tensors):
            continue
        if first is None:
            first = tensors
        found_parts = {tensor.part for tensor in tensors if tensor.name in found}
        if found_parts == {tensor.part for tensor in tensors}:
            return tensors
    assert first is not None
    return first


def _target(array: str, shape: tuple[int, ...], tensor: Tensor, config: ModelConfig) -> Target:
    """A tensor fills rows: the last axis but one of a matrix, or the last of a bias or norm."""
    is_bias = array.endswith("_bias")  # those of experts are [expert, row]
    axis = len(shape) - 1 if is_bias else max(len(shape) - 2, 0)
    start, num_rows = _rows(tensor.part, shape[axis], config)
    index: Index = (*[slice(None)] * axis, slice(start, start + num_rows))
    shape = (*shape[:axis], num_rows, *shape[axis + 1 :])
    if tensor.expert is not None:
        index, shape = (tensor.expert, *index[1:]), shape[1:]
    return Target(array, index, shape)


def _rows(part: Part, num_rows: int, config: ModelConfig) -> tuple[int, int]:
    """First row and number of rows of a part."""
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    half = num_rows // 2
    return {
        Part.ALL: (0, num_rows),
        Part.Q: (0, q),
        Part.K: (q, kv),
        Part.V: (q + kv, kv),
        Part.GATE: (0, half),
        Part.UP: (half, half),
    }[part]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_IN_MESSAGE])
    hidden = len(names) - MAX_NAMES_IN_MESSAGE
    return f"{shown} and {hidden} more" if hidden > 0 else shown
