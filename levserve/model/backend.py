"""The one place that knows the device: everything that differs between devices, as one object.

A backend is chosen once for a model, when it is loaded (`select.py`), logged, and passed on. The decoder, the
sampler, the weight reader, sizing and the programs learn about the device from it alone. `xla.py` has the
backend without kernels, which serves every model on every device and is the reference; `cpu/backend.py` and
`gpu/backend.py` override what their kernels do better.

A backend is a frozen record without arrays, so that it can be a static part of a traced model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from levserve.model.cache import Place
from levserve.model.config import Activation, ModelConfig, Routing
from levserve.model.fp8_rows import Fp8Rows
from levserve.model.int8_packing import BlockOrder
from levserve.model.packed import PackedMatrix, Scheme
from levserve.model.rotary import Angles
from levserve.model.rules import Drawn, Masks, Memory, Rules
from levserve.model.text_attention import Texts
from levserve.model.traits import Traits

Arrays = tuple[jax.Array, ...]
FLOAT32 = jnp.dtype(jnp.float32)
Product = Callable[[jax.Array, jax.Array | None], jax.Array]
"""float32 [row, in] times a matrix: float32 [row, out]. It may skip rows after the first `num_used` [1]."""
PackedProduct = Callable[[jax.Array | Fp8Rows, jax.Array | None], jax.Array]
"""The same, but it also takes rows that are already rounded as the matrix requires."""
CompilerOptions = dict[str, str | bool]


class HeadNorms(NamedTuple):
    """Weights [head_size] of the RMS norms that queries and keys go through before they are rotated."""

    queries: jax.Array
    keys: jax.Array


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention must know about a layer besides its arrays."""

    kv_heads: int
    scale: float
    """The factor of attention scores."""
    eps: float
    """The epsilon of the norms of heads."""
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, config: ModelConfig, window: int | None) -> AttentionShape:
        return cls(config.num_kv_heads, config.score_scale, config.norm_eps, window, config.attention_softcap)


class Likeliest(NamedTuple):
    """Each row's likeliest token and its logit, both [row]; the logit is not finite if none can be drawn."""

    tokens: jax.Array
    values: jax.Array


class ExpertLayer(Protocol):
    """The experts of a layer. Expert numbers are int32, tokens float32 [..., embed]."""

    def one(self, number: jax.Array, tokens: jax.Array) -> jax.Array:
        """One expert on [token, embed]."""

    def chosen(self, numbers: jax.Array, tokens: jax.Array) -> jax.Array:
        """One expert for each token: numbers [token], tokens [token, embed]."""

    def every(self, tokens: jax.Array) -> jax.Array:
        """Every expert on its own tokens, [expert, slot, embed]."""


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """How experts are chosen by the router's scores, and how each computes."""

    num_experts: int
    per_token: int
    routing: Routing
    is_gated: bool
    activation: Activation
    gate_limit: float | None = None
    up_offset: float = 0.0
    """`gate_limit` and `up_offset` are as in `ModelConfig`."""


ExpertMatrix = jax.Array | PackedMatrix
"""Matrices [expert, out, in]; packed ones are in the bits of their checkpoint."""


class Mixture(ExpertLayer, Protocol):
    """Experts with all that a kernel must know about them."""

    @property
    def rule(self) -> ExpertRule: ...

    @property
    def matrices(self) -> tuple[ExpertMatrix, ExpertMatrix]:
        """Gate above up [expert, 2 * mlp, embed], or up alone, and down [expert, embed, mlp]."""

    @property
    def dtype(self) -> jnp.dtype:
        """The type in which they are multiplied."""

    def widened(self) -> Mixture:
        """The same with packed matrices widened."""

    @property
    def biases(self) -> tuple[jax.Array, jax.Array] | None:
        """The biases of these matrices, float32 [expert, 2 * mlp] and [expert, embed], if there are any."""

    @property
    def correction(self) -> jax.Array | None:
        """float32 [expert], if the routing has a correction."""


class ExpertChoice(NamedTuple):
    """The experts of each token and the weights of their results, both [token, experts per token]."""

    experts: jax.Array
    weights: jax.Array


class Backend(ABC):
    """Everything a device must provide. Arrays in and out are plain jax arrays, shaped as methods state."""

    platform: str
    """cpu, gpu or tpu, as jax names it."""
    runs_layers: bool
    """Whether `run_layers` serves this model."""
    draws_tokens: bool
    """Whether `draw` is implemented; otherwise the sampler draws by itself."""
    samples_rows: bool
    """Whether `sample_rows` is implemented, which does all the work of plain and full mode."""
    rounds_products: bool
    """Whether products for attention or the activation come in the weight's type, in half the bytes."""

    @property
    @abstractmethod
    def traits(self) -> Traits: ...

    @property
    def float32_precision(self) -> str:
        """The `jax.default_matmul_precision` of float32 products that must lose little."""
        return "highest"

    @abstractmethod
    def describe(self) -> str:
        """Which kernels compute what, for the log."""

    @abstractmethod
    def attend(
        self,
        qkv: jax.Array,
        pool: jax.Array,
        place: Place,
        angles: Angles | None,
        norms: HeadNorms | None,
        ends: jax.Array | None,
        shape: AttentionShape,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Norms and rotates heads, writes keys and values to the pool, and mixes values that each query sees.

        qkv [row * chunk, head, head_size]: queries, then keys, then values. Gives [row, chunk, query heads *
        head_size] and the pool. With `ends` [row] only the query at that index of each row's chunk is
        computed, as a chunk of one. With `sinks` [query head] each softmax has an extra score without a
        value.
        """

    @abstractmethod
    def text_scratch(self, rows: int, chunk: int, heads: int, size: int, dtype: jnp.dtype) -> Arrays:
        """Scratch memory for `attend_texts`, for texts [row, chunk] and heads of this size and type."""

    @abstractmethod
    def attend_texts(
        self, qkv: jax.Array, texts: Texts, scratch: Arrays, num_heads: int
    ) -> tuple[jax.Array, Arrays]:
        """Rotates heads and lets every position of a text attend to the whole text.

        qkv [row, chunk, 3 * heads * size]: queries, keys, values. Gives [row, chunk, heads * size], and the
        scratch memory for the next call.
        """

    @abstractmethod
    def product(
        self, weight: jax.Array, scale: jax.Array | None, *, in_two_terms: bool = False
    ) -> Product | None:
        """A kernel for products with this matrix [out, in], or None: then XLA multiplies.

        `in_two_terms` rounds the activations of a matrix with scales for blocks of inputs to two int8 terms
        (`int8_blocks`).
        """

    def arrange(self, scheme: Scheme, shape: tuple[int, ...], widened: jnp.dtype) -> Scheme | None:
        """The same scheme with its codes in the order in which a kernel reads such a matrix.

        None: no kernel reads it, so the matrix is better widened when it is loaded.
        """
        return scheme

    @abstractmethod
    def packed_product(
        self, matrix: PackedMatrix, widened: jnp.dtype, summed: jnp.dtype = FLOAT32
    ) -> PackedProduct:
        """Products with a matrix [out, in] that stays in the bits of its checkpoint, multiplied in `widened`.

        They are summed in float32; the results need no more precision than `summed` has.
        """

    def rounds_packed(self, num_rows: int) -> bool:
        """Whether products of this many rows with a packed matrix may come in the type it is widened to."""
        return False

    def round_normed(
        self, x: jax.Array, weight: jax.Array, eps: float, matrix: PackedMatrix, widened: jnp.dtype
    ) -> Fp8Rows | None:
        """The RMS norm of x [row, in], rounded for products with this matrix; None: no kernel does both."""
        return None

    def round_gated(
        self, x: jax.Array, config: ModelConfig, matrix: PackedMatrix, widened: jnp.dtype
    ) -> Fp8Rows | None:
        """A feed-forward part's first product x [row, gate_up], activated and rounded likewise."""
        return None

    def scratch_bytes(self, config: ModelConfig, schemes: Mapping[str, Scheme]) -> int:
        """Memory for matrices in these schemes that are widened while a prompt is computed."""
        return 0

    def run_layers(
        self,
        config: ModelConfig,
        x: jax.Array,
        pools: Sequence[jax.Array],
        place: Place,
        angles: Angles,
        layers: Sequence[Mapping[str, jax.Array]],
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs all layers in one call, only if `runs_layers`; gives x [row, chunk, embed] and the pools."""
        raise NotImplementedError

    @abstractmethod
    def mean(self, x: jax.Array) -> jax.Array:
        """The mean over the last axis, for norms; the axis stays, with a size of one."""

    @abstractmethod
    def mix_experts(self, x: jax.Array, scores: jax.Array, is_real: jax.Array, experts: Mixture) -> jax.Array:
        """The weighted sum of each token's experts, float32 [token, embed]; zeros for padding.

        x float32 [token, embed], scores [token, expert] from the router, is_real [token].
        """

    def add_experts(
        self, added: jax.Array, x: jax.Array, scores: jax.Array, is_real: jax.Array, experts: Mixture
    ) -> jax.Array:
        """`added` plus the result of `mix_experts` for x."""
        return added + self.mix_experts(x, scores, is_real, experts)

    @property
    def refines_logits(self) -> bool:
        """Whether there is a kernel for `refine`."""
        return False

    def refine(
        self, logits: jax.Array, hidden: jax.Array, embed: jax.Array, num_used: jax.Array | None
    ) -> jax.Array:
        """Logits [row, vocab] of an int8 head whose matrix is the embedding. If there is a kernel for it, the
        largest are computed again with the embedding itself, which is not quantized."""
        return logits

    @abstractmethod
    def likeliest(self, logits: jax.Array, num_used: jax.Array | None = None) -> Likeliest:
        """The largest logit of each row of float32 [row, vocab], the first among equals.

        Only the first `num_used` [1] rows count.
        """

    def draw(
        self,
        logits: jax.Array,
        temperature: jax.Array,
        top_k: jax.Array,
        top_p: jax.Array,
        min_p: jax.Array,
        points: jax.Array,
        positions: jax.Array,
        words: jax.Array,
        at: jax.Array,
        slots: jax.Array,
    ) -> Likeliest:
        """Draws by temperature, top-k, top-p and min-p, all [row], only if `draws_tokens`; the values are
        each row's largest logit.

        points [row, attempt, 2] are random numbers, at least 0 and below 1. The first half of them is for a
        row's first draw, the second half for another one if the row's mask (`words`, `at` and `slots`, see
        `rules.Masks`) does not allow the first token; the value is then the largest allowed logit.
        """
        raise NotImplementedError

    def sample_rows(
        self,
        logits: jax.Array,
        positions: jax.Array,
        rules: Rules,
        memory: Memory,
        masks: Masks,
        num_used: jax.Array,
    ) -> Drawn:
        """See `sampler.sample`, only if `samples_rows`. In plain mode `memory` has no tokens and no edits."""
        raise NotImplementedError

    @abstractmethod
    def kv_storage(self, dtype: jnp.dtype) -> jnp.dtype:
        """The type of the array that stores keys and values of type `dtype`."""

    @abstractmethod
    def expert_storage(self, dtype: jnp.dtype) -> jnp.dtype:
        """The type of the arrays that store the matrices of experts."""

    @abstractmethod
    def multiplied_in(self, dtype: jnp.dtype) -> jnp.dtype | None:
        """The type that int8 matrices are multiplied in, `dtype`; None: they are rotated, as integers."""

    @property
    @abstractmethod
    def block_order(self) -> BlockOrder | None:
        """The order of int8 matrices with scales for blocks of inputs; None: that of the inputs."""

    @property
    @abstractmethod
    def can_widen_blocks(self) -> bool:
        """Whether products can widen matrices that have a scale for each block of inputs to bfloat16."""

    @abstractmethod
    def packs(self, kept: jnp.dtype) -> bool:
        """Whether quantized matrices are put in the order of `int8_packing`."""

    @abstractmethod
    def compiler_options(self, *, num_tokens: int, is_prefill: bool, is_quantized: bool) -> CompilerOptions:
        """XLA's options for a program of this many prompt tokens or rows."""
