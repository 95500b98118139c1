"""The architecture of a decoder: all of its numbers, and each named axis, defined once.

Built by the checkpoint readers in `weights/`; read by everything in `model/`. Model families have no names
here: a family is a set of values of these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from haliax import Axis


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    GELU_QUICK = "gelu_quick"
    """The input times the sigmoid of 1.702 times the input."""


class Scoring(StrEnum):
    """The function that turns the router's scores into weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every rotary frequency slowed by one factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class LongScaling:
    """Phi-3's long context: a factor for each rotary frequency, and one for cosines and sines.

    The model has two lists of factors, for contexts up to `original_max_position` and for longer ones.
    `ModelConfig.stretched_for` picks one of them by the length that is served, once, so that cached keys stay
    valid as a text grows.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    is_long: bool = True

    @property
    def factors(self) -> tuple[float, ...]:
        return self.long_factors if self.is_long else self.short_factors


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: low rotary frequencies are slowed by `factor`, high ones stay, those between are blended.

    A frequency that rotates more than `beta_fast` times within the original context is high, one that rotates
    less than `beta_slow` times is low.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    """The factor of cosines and sines."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    """The two bounds are rounded outwards to whole pairs of dimensions."""


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware scaling: the base of the frequencies grows with the length of the text.

    transformers recomputes the base as a text outgrows the original context. Here `ModelConfig.stretched_for`
    sets the length to the one that is served, once, so that cached keys stay valid as a text grows.
    """

    factor: float
    original_max_position: int
    max_seq_len: int

    def stretch(self, theta: float, size: int) -> float:
        """The base of the frequencies of `size` rotated dimensions."""
        ratio = max(self.max_seq_len, self.original_max_position) / self.original_max_position
        return float(theta * (self.factor * ratio - (self.factor - 1)) ** (size / (size - 2)))


RopeScaling = Llama3Scaling | LinearScaling | LongScaling | YarnScaling | DynamicScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of a layer, which rotate the first `size` dimensions of each head."""

    size: int
    theta: float
    scaling: RopeScaling | None


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention whose heads are expanded from short vectors; see `latent_attention.py`."""

    kv_rank: int
    """Size of the vector that keys and values come from."""
    query_rank: int | None
    """The same for queries; None: they come from the layer's input."""
    rotary_size: int
    """Dimensions of a key that all heads share; only these are rotated."""
    value_size: int
    """Size of a head's value; that of its queries and keys is `head_dim`."""
    has_interleaved_pairs: bool = True
    """Checkpoints store the two dimensions that are rotated together as neighbours. Only the checkpoint
    readers look at this."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How the experts of a token are chosen and weighted. Defaults are Mixtral's."""

    renormalises: bool = True
    """The weights of the chosen experts are scaled to sum to one."""
    scoring: Scoring = Scoring.SOFTMAX
    has_correction: bool = False
    """Each expert has a learned bias that is added to its weight only to choose experts."""
    num_groups: int = 1
    groups_per_token: int = 1
    """The experts form groups, and a token may choose only from its best ones."""
    group_best: int = 1
    """How many of a group's largest weights are added up to rank it."""
    scale: float = 1.0
    """The factor of the weights of the chosen experts."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Defaults are Llama's: pre-norm, rotary positions, grouped queries, SiLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward part, or of one expert in a mixture."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float | None
    """None for a model whose positions are not rotary."""
    max_position: int
    tied_head: bool
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    """Base for layers with a window if it differs from `rope_theta`; it is never scaled."""
    rotary_size: int | None = None
    """How many dimensions of each head are rotated; None: all."""
    has_position_table: bool = False
    """Positions are learned and added to the embedding."""
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    head_bias: bool = False

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_spans_heads: bool = False
    """Queries and keys are normalised over all heads together, not each head alone."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer; empty when no layer has one."""
    attention_scale: float | None = None
    """The factor of attention scores; None: one over the square root of the head size."""
    attention_softcap: float | None = None
    latent: Latent | None = None
    """None: queries, keys and values are one product with the layer's input."""
    has_sinks: bool = False
    """Each query head has a learned score that counts in the sum of its softmax but has no value."""
    logit_softcap: float | None = None

    is_parallel: bool = False
    """Attention and feed-forward part read the same input, and both results are added to it."""
    shares_norm: bool = False
    """The feed-forward part has no norm of its own: it uses that of attention."""
    residual_scale: float = 1.0
    """The factor of what attention and feed-forward part add to their input."""
    has_layer_norms: bool = False
    """Layer norms, which subtract the mean and have a bias, instead of RMS norms."""
    has_norm_biases: bool = True
    """Layer norms have a bias."""
    has_pre_norms: bool = True
    has_post_norms: bool = False
    """The results of attention and feed-forward are normalized before they are added."""
    has_offset_norms: bool = False
    """Checkpoints store the weight of every norm minus one. Only the checkpoint readers look at this."""

    has_interleaved_heads: bool = False
    """Checkpoints store the two dimensions that are rotated together as neighbours. Only the checkpoint
    readers look at this."""
    has_transposed_experts: bool = False
    """Checkpoints store the experts' matrices transposed, [expert, in, out], with gate and up interleaved.
    Only the checkpoint readers look at this."""

    activation: Activation = Activation.SILU
    is_gated: bool = True
    gate_limit: float | None = None
    """The gate is clamped to at most this before its activation, and `up` to this on both sides of 0."""
    up_offset: float = 0.0
    """Added to `up` before the gate multiplies it."""
    mlp_bias: bool = False
    """The feed-forward part, or each expert, has biases."""
    num_experts: int = 0
    experts_per_token: int = 0
    routing: Routing = Routing()
    router_bias: bool = False
    shared_size: int = 0
    """Width of the expert that every token uses besides those that it chooses; 0: there is none."""
    has_shared_gate: bool = False
    """The shared expert's result is multiplied by the sigmoid of a learned product with its input."""
    dense_layers: tuple[int, ...] = ()
    """In a mixture, the layers that have no experts."""
    dense_size: int = 0
    """Width of the feed-forward part in `dense_layers`."""

    num_shards: int = 1
    """Devices that share the model. If there are several, the numbers of heads and the widths of feed-forward
    parts are those of one device (see `sharding.py`); everything else is the whole model's."""

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head on each device; the last device may have rows of zeros."""
        return -(-self.vocab_size // self.num_shards)

    def stretched_for(self, max_seq_len: int) -> ModelConfig:
        """The config for a server of at most `max_seq_len` tokens."""
        scaling = self.rope_scaling
        match scaling:
            case LongScaling():
                scaling = replace(scaling, is_long=max_seq_len > scaling.original_max_position)
            case DynamicScaling():
                scaling = replace(scaling, max_seq_len=max_seq_len)
        return replace(self, rope_scaling=scaling)

    def is_mixture(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def rope(self, layer: int) -> Rope | None:
        size = self.head_dim if self.rotary_size is None else self.rotary_size
        if self.local_rope_theta is not None and self.window(layer) is not None:
            return Rope(size, self.local_rope_theta, None)
        return None if self.rope_theta is None else Rope(size, self.rope_theta, self.rope_scaling)

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def Vocab(self) -> Axis:
        return Axis("vocab", self.vocab_rows)

    @property
    def Position(self) -> Axis:
        return Axis("position", self.max_position)

    @property
    def Embed(self) -> Axis:
        return Axis("embed", self.hidden_size)

    @property
    def Expert(self) -> Axis:
        return Axis("expert", self.num_experts)

    @property
    def dense_width(self) -> int:
        """Width of a feed-forward part without experts."""
        return self.dense_size if self.num_experts else self.intermediate_size

    @property
    def Mlp(self) -> Axis:
        return Axis("mlp", self.intermediate_size)

    @property
    def GateUp(self) -> Axis:
        return self.gate_up(self.intermediate_size)

    def gate_up(self, width: int) -> Axis:
        """Rows of the fused projection of a feed-forward part of this width: gate above up, or up alone."""
        return Axis("gate_up", (2 if self.is_gated else 1) * width)

    @property
    def Heads(self) -> Axis:
        return Axis("head", self.num_heads)

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
    def value_size(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_size

    @property
    def Mixed(self) -> Axis:
        """Input of the output projection: every head's result side by side."""
        return Axis("mixed", self.num_heads * self.value_size)
