"""How a model's matrices are kept: what `--quantize` asks for, and what the device and the files allow."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from levserve.errors import ConfigError
from levserve.model.backend import Backend
from levserve.model.config import ModelConfig
from levserve.model.packed import Code, Kept, Scheme
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.quantize import (
    BLOCKS_NAME,
    FOUR_BITS_NAME,
    FP8_NAME,
    IN_FOUR_BITS,
    NARROW,
    WIDENED_NAME,
    is_quantized,
    keep_in_fp8,
)
from levserve.settings.settings import Settings
from levserve.weights.checkpoint import find_four_bit_matrices, is_quantized_checkpoint, read_schemes

LEAST_SHARE = 0.5
"""Of the numbers of the layers, those that must have four bits for a file to be served in them by default.
The others become int8 in blocks, which takes 1.2 to 1.3 times as long as int8 for one stream."""
FP8_CAPABILITY = (8, 9)
"""NVIDIA's GPUs compute in fp8 from Ada and Hopper on; for older ones the programs would not compile."""


def choose_narrow(settings: Settings, platform: str, path: Path, config: ModelConfig) -> jnp.dtype | None:
    """The integers that matrices are served in, or None.

    By default a CPU serves a file that is quantized already in int8, which is twice as fast and loses little
    accuracy, or in four bits: see `choose_format`.
    """
    if settings.quantize == FP8_NAME and platform == "cpu":
        raise ConfigError("--quantize fp8 is for GPUs, and this is a cpu: use --quantize int8")
    other = {BLOCKS_NAME: "int8", FOUR_BITS_NAME: "keep", WIDENED_NAME: "keep"}.get(settings.quantize)
    if other is not None and platform != "cpu":
        raise ConfigError(
            f"--quantize {settings.quantize} is for CPUs, and this is a {platform}: use --quantize {other}"
        )
    if settings.quantize != "auto":
        return NARROW.get(settings.quantize)
    is_free_to_choose = platform == "cpu" and settings.dtype == "auto" and not config.num_experts
    return NARROW["int8"] if is_free_to_choose and is_quantized_checkpoint(path) else None


def choose_format(
    settings: Settings, backend: Backend, path: Path, config: ModelConfig, num_shards: int
) -> str:
    """What `--quantize` names, or its default for this backend; raises `ConfigError` if it cannot be.

    A backend that can widen four bits in its products serves a file in them if nearly all numbers of its
    layers have four: that is more exact than int8, takes half of the memory, and decodes as fast.
    """
    if settings.quantize == WIDENED_NAME and not backend.can_widen_blocks:
        raise ConfigError(
            f"--quantize {WIDENED_NAME} needs a CPU with matrix units (AMX) and --kernels auto: use "
            f"--quantize {FOUR_BITS_NAME}"
        )
    if settings.quantize != "auto" or settings.dtype != "auto" or not backend.can_widen_blocks:
        return settings.quantize
    if num_shards > 1 or config.num_experts or not is_quantized_checkpoint(path):
        return settings.quantize
    in_four_bits, most, total = find_four_bit_matrices(path, config), 0, 0
    for name, shape in parameter_shapes(config).items():
        if is_quantized(name) and name != "head":
            size = math.prod(shape)
            total += size
            most += size if name in in_four_bits else 0
    return WIDENED_NAME if most >= LEAST_SHARE * total else settings.quantize


def choose_four_bits(quantize: str, path: Path, config: ModelConfig, num_shards: int) -> dict[str, Scheme]:
    """The matrices that stay in the four bits of their file; raises `ConfigError` if none can."""
    if quantize not in IN_FOUR_BITS:
        return {}
    if num_shards > 1:
        raise ConfigError(
            f"--quantize {quantize} serves on one device, and --tensor-parallel is {num_shards}: use "
            f"--quantize {BLOCKS_NAME}"
        )
    found = find_four_bit_matrices(path, config)
    if not found:
        raise ConfigError(
            f"--quantize {quantize}: no matrix of {path} has four bits and a scale for 32 inputs: use "
            f"--quantize {BLOCKS_NAME}"
        )
    return found


def choose_kept(
    settings: Settings, platform: str, path: Path, config: ModelConfig, num_shards: int, dtype: jnp.dtype
) -> Kept | None:
    """The matrices in a form that checkpoints have: as this one stores them, or rounded to FP8."""
    if settings.quantize == FP8_NAME:
        return keep_in_fp8(config, dtype)
    if not keeps_bits(settings, platform, path):
        return None
    schemes = read_schemes(path, config, num_shards)
    return Kept(tuple(schemes.items()), dtype) if schemes else None


def keeps_bits(settings: Settings, platform: str, path: Path) -> bool:
    """Whether matrices stay quantized as they are in the checkpoint: by default only on a GPU."""
    if settings.quantize not in ("auto", "keep"):
        return False
    if is_quantized_checkpoint(path):
        return settings.quantize == "keep" or platform == "gpu"
    if settings.quantize == "keep":
        raise ConfigError(f"--quantize keep: the matrices of {path} are not quantized")
    return False


def arrange(kept: Kept, backend: Backend, config: ModelConfig, *, keeps_all: bool = False) -> Kept | None:
    """The same matrices, each in the order in which the backend's kernels read it.

    Those that no kernel reads are left out, unless all are to be kept; None if none is left.
    """
    shapes, schemes = parameter_shapes(config), []
    for name, scheme in kept.schemes:
        arranged = backend.arrange(scheme, shapes[name], kept.widened)
        if arranged is not None or keeps_all:
            schemes.append((name, arranged or scheme))
    return replace(kept, schemes=tuple(schemes)) if schemes else None


def check_eight_bits(settings: Settings, device: jax.Device) -> None:
    """Refuses 8-bit formats that this device cannot compute in."""
    if settings.kv_dtype == "int8" and device.platform != "cpu":
        raise ConfigError(f"--kv-dtype int8 is for CPUs, and this is a {device.platform}: use --kv-dtype fp8")
    options = {"--kv-dtype": settings.kv_dtype, "--quantize": settings.quantize}
    asked = [option for option, value in options.items() if value == "fp8"]
    if asked and not computes_fp8(device):
        raise ConfigError(
            f"{asked[0]} fp8 needs a GPU of compute capability 8.9 or later, and this one has "
            f"{device.compute_capability}"
        )


def check_kept(kept: Kept | None, device: jax.Device) -> None:
    schemes = {} if kept is None else kept.by_name()
    if any(scheme.code is Code.FP8 for scheme in schemes.values()) and not computes_fp8(device):
        raise ConfigError(
            "the checkpoint is in fp8, which needs a GPU of compute capability 8.9 or later, and this one "
            f"has {device.compute_capability}: use --quantize int8 or none"
        )


def computes_fp8(device: jax.Device) -> bool:
    if device.platform != "gpu":
        return True
    return tuple(map(int, device.compute_capability.split("."))) >= FP8_CAPABILITY
