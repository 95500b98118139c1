"""The hierarchical reasoning model of AI-OS ("ACT v1"): one forward pass over whole texts.

Attention is not causal: every position sees every other, so a new token changes the states of all positions
before it, and nothing can be kept from one run to the next. Texts of different lengths are padded on the
right, and no position attends to padding.
"""

from __future__ import annotations

from collections.abc import Mapping

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import lax

from levserve.model.backend import Backend
from levserve.model.feed_forward import CHUNK, ROW, Experts, Mlp
from levserve.model.hrm_config import HrmConfig, hrm_parameter_shapes
from levserve.model.linear import Linear
from levserve.model.norm import rms_norm
from levserve.model.rotary import angles_at
from levserve.model.text_attention import Texts
from levserve.model.xla import XLA_ON_CPU

EMBED_LIMIT, LOGIT_LIMIT = 10.0, 20.0

Arrays = tuple[jax.Array, ...]
Carry = tuple[NamedArray, Arrays]
"""States, and the scratch memory of attention."""


class Block(eqx.Module):
    """Attention and a feed-forward part; the sum after each is normalized."""

    config: HrmConfig = eqx.field(static=True)
    backend: Backend = eqx.field(static=True)
    qkv: Linear
    out: Linear
    mlp: Mlp | Experts


class Level(eqx.Module):
    """Blocks that are run one after another, and the state that they start from."""

    init: NamedArray
    blocks: tuple[Block, ...]

    def __call__(self, state: NamedArray, texts: Texts, scratch: Arrays) -> tuple[NamedArray, Arrays]:
        for block in self.blocks:
            state, scratch = run_block(block, state, texts, scratch)
        return state, scratch


@jax.jit
def run_block(block: Block, x: NamedArray, texts: Texts, scratch: Arrays) -> tuple[NamedArray, Arrays]:
    """x [row, chunk, embed]; jitted so that equal blocks are traced once."""
    config = block.config
    Embed, eps = config.block.Embed, config.block.norm_eps
    with jax.named_scope("attend"):
        qkv = block.qkv(x).rearrange((ROW, CHUNK, "qkv")).array
        qkv = qkv.astype(block.qkv.product_dtype(qkv.shape[0] * qkv.shape[1]))
        mixed, scratch = block.backend.attend_texts(qkv, texts, scratch, config.num_heads)
        x = rms_norm(x + block.out(hax.named(mixed, (ROW, CHUNK, "mixed"))), (Embed,), eps)
    with jax.named_scope("mlp"):
        fed = block.mlp(x) if isinstance(block.mlp, Mlp) else block.mlp(x, texts.is_real)
        return rms_norm(x + fed, (Embed,), eps).rearrange((ROW, CHUNK, "embed")), scratch


class Hrm(eqx.Module):
    """A whole model. Activations are float32 between the products; weights have their own type."""

    config: HrmConfig = eqx.field(static=True)
    embed: NamedArray
    high: Level
    low: Level
    head: Linear
    backend: Backend = eqx.field(static=True)

    @staticmethod
    def from_arrays(
        config: HrmConfig, arrays: Mapping[str, jax.Array], *, backend: Backend = XLA_ON_CPU
    ) -> Hrm:
        """Builds the model from the arrays that `hrm_parameter_shapes` names."""
        assert arrays.keys() == hrm_parameter_shapes(config).keys()
        block = config.block

        def linear(name: str, Out: Axis, In: Axis, *stacked: Axis) -> Linear:
            rounds = backend.rounds_products and Out in (block.QKV, block.GateUp)
            return Linear(hax.named(arrays[name], (*stacked, Out, In)), rounds=rounds)

        def mlp(at: str, *stacked: Axis) -> Mlp:
            gate_up = linear(at + "gate_up", block.GateUp, block.Embed, *stacked)
            return Mlp(block, gate_up, linear(at + "down", block.Embed, block.Mlp, *stacked))

        def feed_forward(at: str) -> Mlp | Experts:
            if not config.num_experts:
                return mlp(at)
            router = linear(at + "router", block.Expert, block.Embed)
            return Experts(block, backend, router, mlp(at + "experts_", block.Expert))

        def level(name: str) -> Level:
            blocks = []
            for index in range(config.num_layers(name)):
                at = f"{name}.layers.{index}."
                qkv = linear(at + "qkv", block.QKV, block.Embed)
                out = linear(at + "out", block.Embed, block.Mixed)
                blocks.append(Block(config, backend, qkv, out, feed_forward(at)))
            return Level(hax.named(arrays[f"{name}.init"], block.Embed), tuple(blocks))

        embed = hax.named(arrays["embed"], (block.Vocab, block.Embed))
        return Hrm(config, embed, level("h"), level("l"), linear("head", block.Vocab, block.Embed), backend)

    def __call__(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """The final states, float32 [row, chunk, embed], of texts [row, chunk] with these lengths [row].

        States of padding are meaningless.
        """
        with jax.default_matmul_precision(self._precision):
            return self._think(tokens, lengths)

    @property
    def _precision(self) -> str:
        """By default a GPU multiplies float32 with ten fraction bits; the cycles would amplify the error."""
        return self.backend.float32_precision if self.embed.dtype == jnp.float32 else "default"

    def _think(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        config = self.config
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        is_real = places < lengths[:, None]
        rope = config.block.rope(0)
        assert rope is not None
        ends = jnp.broadcast_to(lengths[:, None] - 1, tokens.shape)
        texts = Texts(angles_at(places, rope), is_real, ends)
        rows, chunk = tokens.shape
        product_dtype = self.low.blocks[0].qkv.product_dtype(rows * chunk)
        scratch = self.backend.text_scratch(rows, chunk, config.num_heads, config.head_dim, product_dtype)
        x = self.embed.take("vocab", hax.named(tokens, (ROW, CHUNK))).astype(jnp.float32)
        x = hax.clip(x * config.embed_scale, -EMBED_LIMIT, EMBED_LIMIT).rearrange((ROW, CHUNK, "embed"))

        def start(level: Level) -> NamedArray:
            return level.init.astype(jnp.float32).broadcast_to(x.axes)

        def think(_: jax.Array | int, carry: Carry) -> Carry:
            high, scratch = carry

            def think_low(_: jax.Array | int, carry: Carry) -> Carry:
                low, scratch = carry
                return self.low(low + (high + x), texts, scratch)

            low, scratch = lax.fori_loop(0, config.l_cycles, think_low, (start(self.low), scratch))
            return self.high(high + low, texts, scratch)

        high, _ = lax.fori_loop(0, config.h_cycles, think, (start(self.high), scratch))
        return high.rearrange((ROW, CHUNK, "embed")).array

    def logits(self, states: jax.Array) -> jax.Array:
        """float32 scores [row, vocab] of states [row, embed]; ask only for rows that are read."""
        named = hax.named(states, (ROW, self.config.block.Embed))
        with jax.default_matmul_precision("highest" if self.embed.dtype == jnp.float32 else "default"):
            scores = self.head(named).rearrange((ROW, "vocab")).array
        return jnp.clip(scores, -LOGIT_LIMIT, LOGIT_LIMIT)
