"""What a decoder looks like: every number of the architecture, and each named axis once.

Built by the checkpoint readers in `weights/`; read by everything in `model/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from haliax import Axis


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: pre-norm, rotary, grouped queries, gated SiLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_position: int
    tied_head: bool
    rope_scaling: Llama3Scaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer; empty when no layer has one."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def Vocab(self) -> Axis:
        return Axis("vocab", self.vocab_size)

    @property
    def Embed(self) -> Axis:
        return Axis("embed", self.hidden_size)

    @property
    def Mlp(self) -> Axis:
        return Axis("mlp", self.intermediate_size)

    @property
    def GateUp(self) -> Axis:
        return Axis("gate_up", 2 * self.intermediate_size)

    @property
    def KVHeads(self) -> Axis:
        return Axis("kv_head", self.num_kv_heads)

    @property
    def Group(self) -> Axis:
        """Query heads that share one key and value head."""
        return Axis("group", self.num_heads // self.num_kv_heads)

    @property
    def HeadSize(self) -> Axis:
        return Axis("head_size", self.head_dim)

    @property
    def QKV(self) -> Axis:
        """Rows of the fused projection: all queries, then all keys, then all values."""
        return Axis("qkv", (self.num_heads + 2 * self.num_kv_heads) * self.head_dim)

    @property
    def Mixed(self) -> Axis:
        """Input of the output projection: every head's result side by side."""
        return Axis("mixed", self.num_heads * self.head_dim)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every array of the model by its levserve name; matrices are [out, in].

    `qkv` stacks q, k and v rows in that order; `gate_up` stacks gate then up. The seam between `weights/`, which fills these
    arrays, and `Decoder.from_arrays`, which arranges them.
    """
    embed, mixed = config.hidden_size, config.Mixed.size
    layer: dict[str, tuple[int, ...]] = {"input_norm": (embed,), "qkv": (config.QKV.size, embed)}
    if config.qkv_bias:
        layer["qkv_bias"] = (config.QKV.size,)
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    layer["out"] = (embed, mixed)
    if config.out_bias:
        layer["out_bias"] = (embed,)
    layer |= {"mlp_norm": (embed,), "gate_up": (config.GateUp.size, embed), "down": (embed, config.intermediate_size)}

    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, embed)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (embed,)
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, embed)
    return shapes
