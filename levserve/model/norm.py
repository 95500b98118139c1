"""Norms: activations scaled to a mean square of one, over one axis or several."""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
from haliax import Axis, NamedArray


def rms_norm(x: NamedArray, over: Axis | Sequence[Axis], eps: float) -> NamedArray:
    """The norm without a weight."""
    return x * hax.rsqrt(hax.mean(hax.square(x), over) + eps)


class Norm(eqx.Module):
    """An RMS norm over the axes of its weight, or a layer norm, which subtracts the mean."""

    weight: NamedArray
    bias: NamedArray | None
    eps: float = eqx.field(static=True)
    is_layer_norm: bool = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        over = self.weight.axes
        if self.is_layer_norm:
            x = x - hax.mean(x, over)
        x = rms_norm(x, over, self.eps) * self.weight
        return x if self.bias is None else x + self.bias


def apply(norm: Norm | None, x: NamedArray) -> NamedArray:
    """Applies the norm if the model has one at this place."""
    return x if norm is None else norm(x)
