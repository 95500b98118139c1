"""Norms: activations scaled to a mean square of one, over one axis or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import equinox as eqx
import haliax as hax
from haliax import Axis, NamedArray

from levserve.model.backend import Backend
from levserve.model.sharding import mean_over_devices

Mean = Callable[[NamedArray, Sequence[Axis]], NamedArray]


def rms_norm(x: NamedArray, over: Sequence[Axis], eps: float, mean: Mean = hax.mean) -> NamedArray:
    """The norm without a weight."""
    return x * hax.rsqrt(mean(hax.square(x), over) + eps)


class Norm(eqx.Module):
    """An RMS norm over the axes of its weight, or a layer norm, which subtracts the mean."""

    weight: NamedArray
    bias: NamedArray | None
    eps: float = eqx.field(static=True)
    is_layer_norm: bool = eqx.field(static=True)
    backend: Backend = eqx.field(static=True)
    is_partial: bool = eqx.field(static=True, default=False)
    """Whether each of several devices has some of the values that the mean is over."""

    @property
    def is_plain(self) -> bool:
        """Whether it is an RMS norm with a weight and nothing else, over values that are on one device."""
        return self.bias is None and not (self.is_layer_norm or self.is_partial)

    def __call__(self, x: NamedArray) -> NamedArray:
        over = self.weight.axes
        if self.is_layer_norm:
            x = x - self._mean(x, over)
        x = rms_norm(x, over, self.eps, self._mean) * self.weight
        return x if self.bias is None else x + self.bias

    def _mean(self, x: NamedArray, over: Sequence[Axis]) -> NamedArray:
        ordered = x.rearrange((..., *over))
        others = ordered.axes[: -len(over)]
        mean = self.backend.mean(ordered.array.reshape(*(axis.size for axis in others), -1))
        if self.is_partial:
            mean = mean_over_devices(mean)
        return hax.named(mean[..., 0], others)


def apply(norm: Norm | None, x: NamedArray) -> NamedArray:
    """Applies the norm if the model has one at this place."""
    return x if norm is None else norm(x)
