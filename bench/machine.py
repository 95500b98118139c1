"""Measures how fast this machine reads memory and multiplies large matrices, to compare measurements with."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def measure_bandwidth() -> float:
    """Bytes per second of reading a large array."""
    array = jnp.ones((256 << 20) // 4 if jax.devices()[0].platform == "cpu" else (4 << 30) // 4, jnp.float32)
    num_bytes: float = array.nbytes
    return num_bytes / measure_call(jax.jit(jnp.sum), array)


def measure_products(dtype: jnp.dtype) -> float:
    """Floating-point operations per second of multiplying two large matrices."""
    width = 1024 if jax.devices()[0].platform == "cpu" else 8192
    matrix = jnp.ones((width, width), dtype)
    return (
        2.0
        * width**3
        / measure_call(jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32)), matrix)
    )


def measure_call(function: Callable[[jax.Array], jax.Array], array: jax.Array) -> float:
    """Seconds, from the difference between nine calls and one."""

    def seconds_for(times: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([function(array) for _ in range(times)])
        return time.perf_counter() - start

    seconds_for(1)
    once, often = (min(seconds_for(times) for _ in range(5)) for times in (1, 9))
    return (often - once) / 8
