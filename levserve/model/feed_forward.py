"""The feed-forward part of a layer: one, or many experts of which each token uses a few."""

from __future__ import annotations

import functools
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
from haliax import NamedArray

from levserve.model.backend import Backend, ExpertRule
from levserve.model.config import Activation, ModelConfig
from levserve.model.linear import Linear
from levserve.model.packed import PackedMatrix
from levserve.model.sharding import sum_over_devices

ROW, CHUNK = "row", "chunk"
ACTIVATIONS: dict[Activation, Callable[[NamedArray], NamedArray]] = {
    Activation.SILU: hax.nn.silu,
    Activation.GELU: functools.partial(hax.nn.gelu, approximate=False),
    Activation.GELU_TANH: functools.partial(hax.nn.gelu, approximate=True),
}


class Mlp(eqx.Module):
    config: ModelConfig = eqx.field(static=True)
    gate_up: Linear
    down: Linear

    def __call__(self, x: NamedArray, num_used: jax.Array | None = None) -> NamedArray:
        wide = self.gate_up(x, num_used)
        activate = ACTIVATIONS[self.config.activation]
        size = self.config.intermediate_size
        if not self.config.is_gated:
            return self.down(activate(wide).rename({"gate_up": "mlp"}), num_used)
        gate, up = (wide["gate_up", at : at + size].rename({"gate_up": "mlp"}) for at in (0, size))
        return self.down(activate(gate) * up, num_used)


class Experts(eqx.Module):
    """A router, and all experts as one `Mlp` whose matrices are [expert, out, in]."""

    config: ModelConfig = eqx.field(static=True)
    backend: Backend = eqx.field(static=True)
    router: Linear
    stacked: Mlp

    def __call__(self, x: NamedArray, is_real: jax.Array) -> NamedArray:
        """Computes the tokens that are not padding, by `is_real` [row, chunk]; zeros for the rest."""
        config = self.config
        flat = x.flatten_axes((ROW, CHUNK), "token").rearrange(("token", "embed"))
        scores = self.router(flat).rearrange(("token", "expert")).array
        mixed = self.backend.mix_experts(flat.array, scores, is_real.reshape(-1), self)
        if config.num_shards > 1:
            mixed = sum_over_devices(mixed)
        return hax.named(mixed.reshape(*is_real.shape, config.hidden_size), (ROW, CHUNK, "embed"))

    @property
    def rule(self) -> ExpertRule:
        config = self.config
        return ExpertRule(
            config.num_experts,
            config.experts_per_token,
            config.renormalises_experts,
            config.is_gated,
            config.activation,
        )

    @property
    def matrices(self) -> tuple[jax.Array, jax.Array] | None:
        gate_up, down = self.stacked.gate_up.weight, self.stacked.down.weight
        if isinstance(gate_up, PackedMatrix) or isinstance(down, PackedMatrix):
            return None
        return gate_up.array, down.array

    def one(self, number: jax.Array, tokens: jax.Array) -> jax.Array:
        return self._run(
            self.stacked.gate_up.of_expert(number), self.stacked.down.of_expert(number), tokens, "token"
        )

    def chosen(self, numbers: jax.Array, tokens: jax.Array) -> jax.Array:
        named = hax.named(numbers, "token")
        return self._run(
            self.stacked.gate_up.of_each(named), self.stacked.down.of_each(named), tokens, "token"
        )

    def every(self, tokens: jax.Array) -> jax.Array:
        return self._run(self.stacked.gate_up, self.stacked.down, tokens, "expert", "slot")

    def _run(self, gate_up: Linear, down: Linear, tokens: jax.Array, *axes: str) -> jax.Array:
        return (
            Mlp(self.config, gate_up, down)(hax.named(tokens, (*axes, "embed")))
            .rearrange((*axes, "embed"))
            .array
        )
