"""The feed-forward part of a layer: a single one, or many experts of which each token uses a few."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from levserve.model.backend import Backend, ExpertMatrix, ExpertRule
from levserve.model.config import Activation, ModelConfig
from levserve.model.linear import Linear
from levserve.model.norm import Norm
from levserve.model.packed import PackedMatrix
from levserve.model.sharding import on_first_device, sum_over_devices

ROW, CHUNK = "row", "chunk"
ACTIVATIONS: dict[Activation, Callable[[NamedArray], NamedArray]] = {
    Activation.SILU: hax.nn.silu,
    Activation.GELU: functools.partial(hax.nn.gelu, approximate=False),
    Activation.GELU_TANH: functools.partial(hax.nn.gelu, approximate=True),
    Activation.GELU_QUICK: lambda x: x * hax.nn.sigmoid(1.702 * x),
}


class Mlp(eqx.Module):
    config: ModelConfig = eqx.field(static=True)
    gate_up: Linear
    down: Linear

    def __call__(
        self, x: NamedArray, num_used: jax.Array | None = None, norm: Norm | None = None
    ) -> NamedArray:
        """Applies the norm first, if there is one."""
        config = self.config
        wide = self.gate_up.of_normed(x, norm, num_used)
        num_rows = wide.array.size // wide.axis_size(config.GateUp.name)
        as_it_comes = wide.astype(self.gate_up.product_dtype(num_rows))
        product = self.down.of_gated(as_it_comes, config, num_used)
        if product is not None:
            return product
        activate = ACTIVATIONS[config.activation]
        if not config.is_gated:
            return self.down(activate(wide).rename({"gate_up": "mlp"}), num_used)
        size = wide.axis_size("gate_up") // 2
        gate, up = (wide["gate_up", at : at + size].rename({"gate_up": "mlp"}) for at in (0, size))
        if config.gate_limit is not None:
            gate = hax.minimum(gate, config.gate_limit)
            up = hax.clip(up, -config.gate_limit, config.gate_limit)
        return self.down(activate(gate) * (up + config.up_offset if config.up_offset else up), num_used)


class Experts(eqx.Module):
    """A router, and all experts as one `Mlp` whose matrices are [expert, out, in].

    A model may have a `shared` expert that every token uses too.
    """

    config: ModelConfig = eqx.field(static=True)
    backend: Backend = eqx.field(static=True)
    router: Linear
    stacked: Mlp
    router_correction: NamedArray | None = None
    shared: Mlp | None = None
    shared_gate: Linear | None = None

    def __call__(self, x: NamedArray, is_real: jax.Array) -> NamedArray:
        """Computes the tokens that are not padding, by `is_real` [row, chunk]; zeros for the rest."""
        flat = _by_token(x)
        mixed = self.backend.mix_experts(flat.array, self._scores(flat), is_real.reshape(-1), self)
        if self.shared is not None:
            mixed = mixed + self._run_shared(flat)
        if self.config.num_shards > 1:
            mixed = sum_over_devices(mixed)
        return self._by_row(mixed, is_real)

    def add_to(self, added: NamedArray, x: NamedArray, is_real: jax.Array) -> NamedArray:
        """`added` plus the result for x."""
        if self.shared is not None or self.config.num_shards > 1:
            return added + self(x, is_real)
        flat = _by_token(x)
        given = _by_token(added).array, flat.array, self._scores(flat), is_real.reshape(-1)
        return self._by_row(self.backend.add_experts(*given, self), is_real)

    def _scores(self, tokens: NamedArray) -> jax.Array:
        return self.router(tokens).rearrange(("token", "expert")).array

    def _by_row(self, mixed: jax.Array, is_real: jax.Array) -> NamedArray:
        return hax.named(mixed.reshape(*is_real.shape, self.config.hidden_size), (ROW, CHUNK, "embed"))

    def _run_shared(self, tokens: NamedArray) -> jax.Array:
        assert self.shared is not None
        result = self.shared(tokens)
        if self.shared_gate is not None:
            result = result * hax.nn.sigmoid(self.shared_gate(tokens)["gate", 0])
        return result.rearrange(("token", "embed")).array

    @property
    def rule(self) -> ExpertRule:
        config = self.config
        return ExpertRule(
            config.num_experts,
            config.experts_per_token,
            config.routing,
            config.is_gated,
            config.activation,
            config.gate_limit,
            config.up_offset,
        )

    @property
    def matrices(self) -> tuple[ExpertMatrix, ExpertMatrix]:
        gate_up, down = self.stacked.gate_up.weight, self.stacked.down.weight
        return (
            gate_up if isinstance(gate_up, PackedMatrix) else gate_up.array,
            down if isinstance(down, PackedMatrix) else down.array,
        )

    @property
    def dtype(self) -> jnp.dtype:
        gate_up = self.stacked.gate_up
        if isinstance(gate_up.weight, PackedMatrix):
            assert gate_up.widened is not None
            return gate_up.widened
        return gate_up.weight.dtype

    def widened(self) -> Experts:
        gate_up, down = self.stacked.gate_up.in_widened_type(), self.stacked.down.in_widened_type()
        return replace(self, stacked=replace(self.stacked, gate_up=gate_up, down=down))

    @property
    def biases(self) -> tuple[jax.Array, jax.Array] | None:
        gate_up, down = self.stacked.gate_up.bias, self._down.bias
        return None if gate_up is None or down is None else (gate_up.array, down.array)

    @property
    def correction(self) -> jax.Array | None:
        return None if self.router_correction is None else self.router_correction.array

    @property
    def _down(self) -> Linear:
        """The down matrices, with a bias on the first device only: a sum over devices must count it once."""
        down = self.stacked.down
        if down.bias is None or self.config.num_shards == 1:
            return down
        bias = hax.named(on_first_device(down.bias.array), down.bias.axes)
        return Linear(down.weight, bias, widened=down.widened)

    def one(self, number: jax.Array, tokens: jax.Array) -> jax.Array:
        return self._run(
            self.stacked.gate_up.of_expert(number), self._down.of_expert(number), tokens, "token"
        )

    def chosen(self, numbers: jax.Array, tokens: jax.Array) -> jax.Array:
        named = hax.named(numbers, "token")
        return self._run(self.stacked.gate_up.of_each(named), self._down.of_each(named), tokens, "token")

    def every(self, tokens: jax.Array) -> jax.Array:
        return self._run(self.stacked.gate_up, self._down, tokens, "expert", "slot")

    def _run(self, gate_up: Linear, down: Linear, tokens: jax.Array, *axes: str) -> jax.Array:
        return (
            Mlp(self.config, gate_up, down)(hax.named(tokens, (*axes, "embed")))
            .rearrange((*axes, "embed"))
            .array
        )


def _by_token(x: NamedArray) -> NamedArray:
    return x.flatten_axes((ROW, CHUNK), "token").rearrange(("token", "embed"))
