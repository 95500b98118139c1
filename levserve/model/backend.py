"""The one place that knows the device: everything that differs between devices, as one object.

A backend is chosen once for a model when it is loaded (`select.py`), logged, and handed on. The decoder, the
sampler, the reader of weights, sizing and the programs ask it and nothing else. `xla.py` is the plain way,
which serves every model on every device and is the reference; `cpu/backend.py` and `gpu/backend.py` override
what their kernels do better.

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
"""The same, also of rows that are rounded already as the matrix wants them."""
CompilerOptions = dict[str, str | bool]


class HeadNorms(NamedTuple):
    """Weights [head_size] of the RMS norms that queries and keys go through before they are rotated."""

    queries: jax.Array
    keys: jax.Array


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention must know of a layer besides its arrays."""

    kv_heads: int
    scale: float
    """Of scores."""
    eps: float
    """Of the norms of heads."""
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, config: ModelConfig, window: int | None) -> AttentionShape:
        return cls(config.num_kv_heads, config.score_scale, config.norm_eps, window, config.attention_softcap)


class Likeliest(NamedTuple):
    """Each row's likeliest token and its logit, both [row]; not finite if the row cannot be drawn from."""

    tokens: jax.Array
    values: jax.Array


class ExpertLayer(Protocol):
    """The experts of a layer. Expert numbers are int32, tokens float32 [..., embed]."""

    def one(self, number: jax.Array, tokens: jax.Array) -> jax.Array:
        """One expert on [token, embed]."""

    def chosen(self, numbers: jax.Array, tokens: jax.Array) -> jax.Array:
        """An expert for each token: [token] on [token, embed]."""

    def every(self, tokens: jax.Array) -> jax.Array:
        """Tokens for each expert: [expert, slot, embed]."""


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
    """These two as in `ModelConfig`."""


class Mixture(ExpertLayer, Protocol):
    """Experts with all that a kernel must know of them."""

    @property
    def rule(self) -> ExpertRule: ...

    @property
    def matrices(self) -> tuple[jax.Array, jax.Array] | None:
        """Gate above up [expert, 2 * mlp, embed], or up alone, and down [expert, embed, mlp]; None if they
        are in the bits of their checkpoint."""

    @property
    def biases(self) -> tuple[jax.Array, jax.Array] | None:
        """Of the same two, float32 [expert, 2 * mlp] and [expert, embed], if there are any."""

    @property
    def correction(self) -> jax.Array | None:
        """float32 [expert], if the routing has a correction."""


class ExpertChoice(NamedTuple):
    """The experts of each token and the weights of their results, both [token, experts per token]."""

    experts: jax.Array
    weights: jax.Array


class Backend(ABC):
    """Everything a device must provide. Arrays in and out are plain jax arrays, shapes as the methods say."""

    platform: str
    """cpu, gpu or tpu, as jax names it."""
    runs_layers: bool
    """Whether `run_layers` serves this model."""
    draws_tokens: bool
    """Whether `draw` is there; otherwise the sampler's own way draws."""
    samples_rows: bool
    """Whether `sample_rows` is there, which does all that the sampler does."""
    rounds_products: bool
    """Whether products for attention or the activation come in the weight's type: half of the bytes."""

    @property
    @abstractmethod
    def traits(self) -> Traits: ...

    @property
    def float32_precision(self) -> str:
        """How float32 is multiplied where little may be lost, as `jax.default_matmul_precision` names it."""
        return "highest"

    @abstractmethod
    def describe(self) -> str:
        """What computes what, for the log."""

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
        """Norms and rotates heads, writes keys and values to the pool, and mixes what each query may see.

        qkv [row * chunk, head, head_size]: queries, then keys, then values. Gives [row, chunk, query heads *
        head_size] and the pool. With `ends` [row] only the query at that place of each row's chunk is mixed,
        as a chunk of one. With `sinks` [query head] each softmax has one score more, to which no value
        belongs.
        """

    @abstractmethod
    def text_scratch(self, rows: int, chunk: int, heads: int, size: int, dtype: jnp.dtype) -> Arrays:
        """Memory that `attend_texts` works in, for texts [row, chunk] and heads of this size and type."""

    @abstractmethod
    def attend_texts(
        self, qkv: jax.Array, texts: Texts, scratch: Arrays, num_heads: int
    ) -> tuple[jax.Array, Arrays]:
        """Rotates heads and mixes all of a text for each of its positions.

        qkv [row, chunk, 3 * heads * size]: queries, keys, values. Gives [row, chunk, heads * size], and the
        memory for the next call.
        """

    @abstractmethod
    def product(
        self, weight: jax.Array, scale: jax.Array | None, *, in_two_terms: bool = False
    ) -> Product | None:
        """A kernel for products with this matrix [out, in], or None: then XLA multiplies.

        One with scales for blocks of inputs may want its activations in two terms (`int8_blocks`).
        """

    def arrange(self, scheme: Scheme, shape: tuple[int, ...], widened: jnp.dtype) -> Scheme | None:
        """The same scheme with its codes in the order in which a kernel reads such a matrix.

        None: no kernel does, so that the matrix is better widened when it is loaded.
        """
        return scheme

    @abstractmethod
    def packed_product(
        self, matrix: PackedMatrix, widened: jnp.dtype, summed: jnp.dtype = FLOAT32
    ) -> PackedProduct:
        """Products with a matrix [out, in] that is in the bits of its checkpoint, multiplied in `widened`.

        They are summed in float32, and need no more bits than `summed` has.
        """

    def rounds_packed(self, num_rows: int) -> bool:
        """Whether products of so many rows with such a matrix may come in the type that it is widened to."""
        return False

    def round_normed(
        self, x: jax.Array, weight: jax.Array, eps: float, matrix: PackedMatrix, widened: jnp.dtype
    ) -> Fp8Rows | None:
        """The RMS norm of x [row, in] as products with this matrix take it; None: no kernel does both."""
        return None

    def round_gated(
        self, x: jax.Array, config: ModelConfig, matrix: PackedMatrix, widened: jnp.dtype
    ) -> Fp8Rows | None:
        """What a feed-forward layer's first product x [row, gate_up] becomes, likewise."""
        return None

    def run_layers(
        self,
        config: ModelConfig,
        x: jax.Array,
        pools: Sequence[jax.Array],
        place: Place,
        angles: Angles,
        layers: Sequence[Mapping[str, jax.Array]],
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """All layers in one call, if `runs_layers`: x [row, chunk, embed] after the last, and the pools."""
        raise NotImplementedError

    @abstractmethod
    def mean(self, x: jax.Array) -> jax.Array:
        """The mean over the last axis, which norms divide by. It stays, with a size of one."""

    @abstractmethod
    def mix_experts(self, x: jax.Array, scores: jax.Array, is_real: jax.Array, experts: Mixture) -> jax.Array:
        """The weighted sum of each token's experts, float32 [token, embed]; zeros for padding.

        x float32 [token, embed], scores [token, expert] by the router, is_real [token].
        """

    def add_experts(
        self, added: jax.Array, x: jax.Array, scores: jax.Array, is_real: jax.Array, experts: Mixture
    ) -> jax.Array:
        """What `mix_experts` makes of x, added to this."""
        return added + self.mix_experts(x, scores, is_real, experts)

    def refine(
        self, logits: jax.Array, hidden: jax.Array, embed: jax.Array, num_used: jax.Array | None
    ) -> jax.Array:
        """Logits of an int8 head [row, vocab], the largest of them made exact with the embedding, which is
        its matrix, if there is a kernel for it."""
        return logits

    @abstractmethod
    def likeliest(self, logits: jax.Array, num_used: jax.Array | None = None) -> Likeliest:
        """The largest logit of the first `num_used` [1] rows of float32 [row, vocab]; of equals the first."""

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

        points [row, attempt, 2] are random numbers, at least 0 and below 1. The first half is for a row's
        first draw. The others are for a second one, where the mask that `words`, `at` and `slots` tell of
        (see `rules.Masks`) does not allow the first token; its value is the largest of the allowed logits.
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
        """See `sampler.sample`, only if `samples_rows`. Plain mode gives a memory of no tokens and edits."""
        raise NotImplementedError

    @abstractmethod
    def kv_storage(self, dtype: jnp.dtype) -> jnp.dtype:
        """The type of the array that stores keys and values of type `dtype`."""

    @abstractmethod
    def expert_storage(self, dtype: jnp.dtype) -> jnp.dtype:
        """The type of the arrays that store the matrices of experts."""

    @abstractmethod
    def multiplied_in(self, kept: jnp.dtype, dtype: jnp.dtype) -> jnp.dtype | None:
        """The type that matrices kept as `kept` are multiplied in; None: rotated, as integers."""

    @property
    @abstractmethod
    def block_order(self) -> BlockOrder | None:
        """The order of int8 matrices with scales for blocks of inputs; None: as they are."""

    @abstractmethod
    def packs(self, kept: jnp.dtype) -> bool:
        """Whether quantized matrices are put in the order of `int8_packing`."""

    @abstractmethod
    def compiler_options(self, *, num_tokens: int, is_prefill: bool, is_quantized: bool) -> CompilerOptions:
        """XLA's options for a program of this many prompt tokens or rows."""
