"""Chooses the backend of a model, once, when it is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from levserve.model.backend import Backend
from levserve.model.config import ModelConfig
from levserve.model.xla import XlaBackend

KERNELS = ("auto", "xla")
"""What `--kernels` may be."""


class Chosen(NamedTuple):
    backend: Backend
    reason: str
    """Why it is this one, for the log."""


def choose_backend(
    platform: str,
    config: ModelConfig,
    *,
    kernels: str = "auto",
    quantized: jnp.dtype | None = None,
    dtype: jnp.dtype = jnp.dtype(jnp.bfloat16),
    kv_dtype: jnp.dtype = jnp.dtype(jnp.bfloat16),
) -> Chosen:
    """The best backend for a model whose matrices are in `dtype`, or in eight bits if `quantized`, on this
    platform."""
    plain = XlaBackend(platform)
    if kernels == "xla":
        return Chosen(plain, "--kernels xla")
    if platform == "cpu":
        return _choose_for_cpu(plain, config, quantized, quantized or dtype, kv_dtype)
    if platform == "gpu":
        from levserve.model.gpu.backend import (  # Pallas, which a CPU's start does without
            GpuBackend,
            refuse_model,
        )

        refusal = refuse_model(config.head_dim)
        if refusal is not None:
            return Chosen(plain, f"the GPU kernels do not take {refusal}")
        return Chosen(GpuBackend(), "an NVIDIA GPU")
    return Chosen(plain, f"there are no kernels for a {platform}")


def _choose_for_cpu(
    plain: XlaBackend,
    config: ModelConfig,
    quantized: jnp.dtype | None,
    matrices: jnp.dtype,
    kv_dtype: jnp.dtype,
) -> Chosen:
    from levserve.jit.target import detect_target  # brings LLVM, which a GPU's start does without
    from levserve.jit.xla_call import refuse_xla
    from levserve.model.cpu import attention
    from levserve.model.cpu.backend import fit_target

    refusal = refuse_xla()
    if refusal is not None:
        return Chosen(plain, refusal)
    refusal = attention.refuse_unservable(config.head_dim)
    if refusal is not None:
        return Chosen(plain, f"the CPU kernels do not take {refusal}")
    backend = fit_target(detect_target(), is_int8=quantized == jnp.int8)
    refusal = backend.refuse_layers(config, matrices, kv_dtype)
    if refusal is not None:
        return Chosen(backend, f"layers one by one: {refusal}")
    return Chosen(replace(backend, runs_layers=True), "compiled for this CPU")
