"""Chooses the backend of a model, once, when it is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from levserve.model.backend import Backend
from levserve.model.config import ModelConfig
from levserve.model.xla import XlaBackend


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
    is_packed: bool = False,
) -> Chosen:
    """The best backend for matrices in `dtype`, or in eight bits if `quantized`, on this platform.

    If `is_packed`, matrices stay in the bits of their checkpoint.
    """
    plain = XlaBackend(platform)
    if kernels == "xla":
        return Chosen(plain, "--kernels xla")
    if platform == "cpu":
        if is_packed:
            return Chosen(plain, "the CPU kernels do not take matrices in the bits of their checkpoint")
        return _choose_for_cpu(plain, config, quantized or dtype, kv_dtype)
    if platform == "gpu":
        from levserve.model.gpu import backend as gpu  # brings Pallas, which a CPU does not need

        reason = gpu.unsupported_reason(config.head_dim)
        if reason is not None:
            return Chosen(plain, f"the GPU kernels do not take {reason}")
        return Chosen(gpu.GpuBackend(), "an NVIDIA GPU")
    return Chosen(plain, f"there are no kernels for a {platform}")


def choose_text_backend(platform: str, config: ModelConfig, kernels: str = "auto") -> Backend:
    """The same for a model that computes whole texts. Of a CPU's kernels, only the sampling one is used."""
    if platform == "cpu" and kernels == "auto":
        from levserve.jit import xla_call  # brings LLVM, which a GPU does not need
        from levserve.model.cpu.backend import CpuTextBackend

        if xla_call.unsupported_reason() is None:
            return CpuTextBackend()
    if platform == "cpu":
        return XlaBackend(platform)
    return choose_backend(platform, config, kernels=kernels).backend


def _choose_for_cpu(
    plain: XlaBackend, config: ModelConfig, matrices: jnp.dtype, kv_dtype: jnp.dtype
) -> Chosen:
    from levserve.jit import xla_call  # brings LLVM, which a GPU does not need
    from levserve.jit.target import detect_target
    from levserve.model.cpu import attention
    from levserve.model.cpu.backend import fit_target

    reason = xla_call.unsupported_reason()
    if reason is not None:
        return Chosen(plain, reason)
    reason = attention.unsupported_reason(config.head_dim)
    if reason is not None:
        return Chosen(plain, f"the CPU kernels do not take {reason}")
    backend = fit_target(detect_target())
    reason = backend.layers_unsupported_reason(config, matrices, kv_dtype)
    if reason is not None:
        return Chosen(backend, f"runs layers one at a time: {reason}")
    return Chosen(replace(backend, runs_layers=True), "compiled for this CPU")
