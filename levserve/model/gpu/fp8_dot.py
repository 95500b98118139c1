"""Hopper's native product of FP8 matrices, for Pallas kernels.

Tensor cores of an H100 or H200 accumulate FP8 products with fewer bits than float32 has. Triton uses
their FP8 instructions only if it is told how many products may be accumulated that way, and otherwise
widens FP8 to float16. Pallas does not tell it, so this primitive does. Kernels add the sums of 128
products in float32, as DeepSeek's do.

The primitive needs parts of jax that may change with any version, so it may be unavailable.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxlib.mlir import ir

log = logging.getLogger(__name__)

MOST_PRODUCTS = 128
"""The most products that the instructions themselves accumulate."""

_dot_p = core.Primitive("dot_fp8")


def dot_fp8(left: jax.Array, right: jax.Array) -> jax.Array:
    """FP8 [m, k] times FP8 [k, n]: float32 [m, n]. Only in a kernel for NVIDIA GPUs, compiled by Triton."""
    assert has_dot_fp8()
    product: jax.Array = _dot_p.bind(left, right)
    return product


@functools.cache
def has_dot_fp8() -> bool:
    """Whether this version of jax has what `dot_fp8` needs; logs one warning if it does not."""
    try:
        _register()
    except (ImportError, AttributeError) as error:
        log.warning(
            "jax %s lacks what FP8 products in kernels need (%s); FP8 is widened instead",
            jax.__version__,
            error,
        )
        return False
    return True


def _shape(left: Any, right: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray((left.shape[0], right.shape[1]), jnp.dtype(jnp.float32))


_dot_p.def_abstract_eval(_shape)


def _register() -> None:
    from jax._src.pallas.triton import lowering as private

    lowering: Any = private

    dot, make_zeros = lowering.tt_dialect.dot, lowering._zeros

    def lower(context: Any, left: Any, right: Any) -> Any:
        (num_rows, _), (_, num_columns) = (ir.RankedTensorType(each.type).shape for each in (left, right))
        zeros = make_zeros(ir.RankedTensorType.get([num_rows, num_columns], ir.F32Type.get()))
        return dot(left, right, zeros, max_num_imprecise_acc=MOST_PRODUCTS)

    lowering.register_lowering(_dot_p)(lower)
