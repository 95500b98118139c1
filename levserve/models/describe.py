"""The second step of a start: what the model is, and how this device serves it.

Reads configuration files and no weights. Everything that is chosen by the kind of device is chosen here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from levserve.device.platform import kernel_platform, open_device
from levserve.errors import ConfigError
from levserve.model import cache
from levserve.model.backend import Backend
from levserve.model.config import ModelConfig, parameter_shapes
from levserve.model.decoder import Decoder
from levserve.model.quantize import NARROW, Quantization, choose_quantization
from levserve.model.select import choose_backend
from levserve.settings.settings import Settings
from levserve.weights.checkpoint import is_quantized_file, read_config
from levserve.weights.model_files import ModelFiles

FP8_CAPABILITY = (8, 9)
"""NVIDIA's GPUs compute in fp8 from Ada and Hopper on; for older ones the programs would not compile."""


@dataclass(frozen=True, slots=True)
class Description:
    """A model and the way it is served, decided before any weight is read.

    A reload replaces `settings` and `files`; weights that need anything else to change are refused.
    """

    settings: Settings
    files: ModelFiles
    config: ModelConfig
    device: jax.Device
    dtype: jnp.dtype
    quantization: Quantization | None
    backend: Backend
    backend_reason: str
    kv_dtype: jnp.dtype

    @property
    def storage(self) -> jnp.dtype:
        """The type that KV pages are stored in."""
        return self.backend.kv_storage(self.kv_dtype)

    @property
    def read_dtype(self) -> jnp.dtype:
        """The type in which weights are read: those that will be quantized are not rounded before."""
        return self.dtype if self.quantization is None else jnp.dtype(jnp.float32)

    @property
    def page_bytes(self) -> int:
        return cache.page_bytes(self.config, self.settings.page_size, self.storage)

    @property
    def expected_weight_bytes(self) -> int:
        kept = self.dtype if self.quantization is None else self.quantization.kept
        return parameter_bytes(self.config, kept)

    def make_decoder(self, arrays: Mapping[str, jax.Array], max_seq_len: int = 0) -> Decoder:
        """The decoder for sequences of this length at most, or of any that the model takes."""
        config = self.config.stretched_for(max_seq_len) if max_seq_len else self.config
        return Decoder.from_arrays(config, arrays, backend=self.backend, quantization=self.quantization)

    def lines(self) -> list[str]:
        """The description for people."""
        return [
            f"device      {self.device}",
            f"matrices    {self.quantization or self.dtype}",
            f"backend     {self.backend.describe()} ({self.backend_reason})",
            f"KV cache    keys and values in {self.kv_dtype}",
        ]


def describe(settings: Settings, files: ModelFiles) -> Description:
    """Raises `ConfigError` for settings that the device or the model cannot serve."""
    device = open_device(settings)
    config = read_config(files.path, files.config_file)
    dtype = jnp.dtype(jnp.float32 if settings.dtype == "float32" else jnp.bfloat16)
    check_fp8(settings, device)
    narrow = choose_narrow(settings, device.platform, files.path, config)
    kv_dtype = cache.kv_dtype(settings.kv_dtype, dtype)
    backend, reason = choose_backend(
        kernel_platform(device),
        config,
        kernels=settings.kernels,
        quantized=narrow,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    return Description(
        settings=settings,
        files=files,
        config=config,
        device=device,
        dtype=dtype,
        quantization=choose_quantization(narrow, backend, dtype),
        backend=backend,
        backend_reason=reason,
        kv_dtype=kv_dtype,
    )


def choose_narrow(settings: Settings, platform: str, path: Path, config: ModelConfig) -> jnp.dtype | None:
    """The type of eight bits that matrices are served in, or None.

    By default a CPU serves a file that is quantized already in int8: it is twice as fast, and little is lost.
    """
    if settings.quantize == "fp8" and platform == "cpu":
        raise ConfigError("--quantize fp8 is for GPUs, and this is a cpu: use --quantize int8")
    if settings.quantize != "auto":
        return NARROW.get(settings.quantize)
    is_free_to_choose = platform == "cpu" and settings.dtype == "auto" and not config.num_experts
    return NARROW["int8"] if is_free_to_choose and is_quantized_file(path) else None


def check_fp8(settings: Settings, device: jax.Device) -> None:
    options = {"--kv-dtype": settings.kv_dtype, "--quantize": settings.quantize}
    asked = [option for option, value in options.items() if value == "fp8"]
    if not asked or device.platform != "gpu":
        return
    capability = device.compute_capability
    if tuple(map(int, capability.split("."))) < FP8_CAPABILITY:
        raise ConfigError(
            f"{asked[0]} fp8 needs a GPU of compute capability 8.9 or later, and this one has {capability}"
        )


def parameter_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of all weights with matrices in this type; vectors are float32."""
    return sum(
        math.prod(shape) * (dtype.itemsize if len(shape) > 1 else 4)
        for shape in parameter_shapes(config).values()
    )
