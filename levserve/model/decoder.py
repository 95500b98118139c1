"""The decoder: one forward pass for prefill and decode, over paged KV.

The hot call passes flat tuples of arrays, and the model is rebuilt from its leaves inside the trace
(`device/rounds.py`, `assembly.py`). `layer.py` has its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from levserve.model import cache
from levserve.model.assembly import Assembly
from levserve.model.backend import Backend
from levserve.model.balance import BALANCE
from levserve.model.config import ModelConfig
from levserve.model.feed_forward import CHUNK, ROW
from levserve.model.layer import Layer, run_layer
from levserve.model.linear import Linear
from levserve.model.norm import Norm
from levserve.model.packed import Kept
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.quantize import Quantization
from levserve.model.rotary import angles_at
from levserve.model.sharding import gather_over_devices, look_up_over_devices
from levserve.model.xla import XLA_ON_CPU


class Decoder(eqx.Module):
    """A whole model. Activations are float32 between the products; weights and KV have their own types."""

    config: ModelConfig = eqx.field(static=True)
    embed: NamedArray
    positions: NamedArray | None
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear | None
    head_balance: NamedArray | None
    """What hidden states are multiplied by before the head, if its matrix is balanced."""
    backend: Backend = eqx.field(static=True)

    @staticmethod
    def from_arrays(
        config: ModelConfig,
        arrays: Mapping[str, jax.Array],
        *,
        backend: Backend = XLA_ON_CPU,
        quantization: Quantization | Kept | None = None,
    ) -> Decoder:
        """Builds the model from the arrays that `parameter_shapes` names, or from quantized ones."""
        assert arrays.keys() == parameter_shapes(config).keys() or any(
            name.endswith("_scale") for name in arrays
        )
        parts = Assembly(config, arrays, backend, quantization)
        final_norm = parts.norm("final_norm", config.Embed)
        assert final_norm is not None
        return Decoder(
            config,
            hax.named(arrays["embed"], (config.Vocab, config.Embed)),
            parts.optional("positions", config.Position, config.Embed),
            tuple(parts.layer(index) for index in range(config.num_layers)),
            final_norm,
            parts.linear("head", config.Vocab, config.Embed) if "head" in arrays else None,
            parts.optional(BALANCE, config.Embed),
            backend,
        )

    def __call__(
        self,
        tokens: jax.Array,
        pools: tuple[jax.Array, ...],
        table: jax.Array,
        positions: jax.Array,
        ends: jax.Array | None = None,
    ) -> tuple[NamedArray, tuple[jax.Array, ...]]:
        """Runs a chunk of each row, and gives its hidden states and the pools.

        tokens and positions [row, chunk], table [row, page]. Positions must be the row's next ones, or
        negative for padding, whose results are meaningless. With `ends` [row] only the hidden state at that
        index of each chunk is computed to the end, and returned as a chunk of one.
        """
        config = self.config
        x = self._embed(tokens) * config.embed_scale
        if self.positions is not None:
            x = x + self.positions.take(
                "position", hax.named(jnp.maximum(positions, 0), (ROW, CHUNK))
            ).astype(jnp.float32)
        place = cache.place(table, positions, pools[0])
        ropes = [config.rope(index) for index in range(config.num_layers)]
        angles = {rope: None if rope is None else angles_at(positions, rope) for rope in ropes}
        if ends is None and self.backend.runs_layers:
            ordered = x.rearrange((ROW, CHUNK, "embed"))
            shared = angles[ropes[0]]
            assert shared is not None  # layers that run in one call share the same rotary positions
            arrays = [layer.arrays for layer in self.layers]
            run, pools = self.backend.run_layers(config, ordered.array, pools, place, shared, arrays)
            return self.final_norm(hax.named(run, ordered.axes)), pools
        written = []
        for index, (layer, pool) in enumerate(zip(self.layers, pools, strict=True)):
            last_ends = ends if layer is self.layers[-1] else None
            x, pool = run_layer(
                layer, x, pool, place, angles[ropes[index]], last_ends, window=config.window(index)
            )
            written.append(pool)
        return self.final_norm(x), tuple(written)

    def _embed(self, tokens: jax.Array) -> NamedArray:
        if self.config.num_shards > 1:
            found = look_up_over_devices(self.embed.array, tokens)
            return hax.named(found, (ROW, CHUNK, "embed"))
        return self.embed.take("vocab", hax.named(tokens, (ROW, CHUNK))).astype(jnp.float32)

    @property
    def _is_head_refined(self) -> bool:
        """Whether the head is the embedding in int8 with a scale per row, and the embedding itself is not."""
        config, head = self.config, self.head
        if head is None or not config.tied_head or config.head_bias or config.num_shards > 1:
            return False
        return head.scale is not None and head.scale.ndim == 1 and head.widened is None

    def logits(self, hidden: NamedArray, num_used: jax.Array | None = None) -> jax.Array:
        """float32 scores [row, vocab] of hidden states [row, embed]; ask only for rows that are sampled."""
        head = Linear(self.embed, backend=self.backend) if self.head is None else self.head
        given = hidden if self.head_balance is None else hidden * self.head_balance
        scores = head(given, num_used).rearrange((ROW, "vocab")).array
        if self._is_head_refined:
            states = hidden.rearrange((ROW, "embed")).array
            scores = self.backend.refine(scores, states, self.embed.array, num_used)
        if self.config.num_shards > 1:
            scores = gather_over_devices(scores)[:, : self.config.vocab_size]
        scores = scores * self.config.logit_scale
        cap = self.config.logit_softcap
        return scores if cap is None else cap * jnp.tanh(scores / cap)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A decoder without its arrays; if several devices share a model, what each of them runs."""

    config: ModelConfig
    backend: Backend = XLA_ON_CPU
    quantization: Quantization | Kept | None = None

    def build(self, arrays: Mapping[str, jax.Array]) -> Decoder:
        return Decoder.from_arrays(self.config, arrays, backend=self.backend, quantization=self.quantization)
