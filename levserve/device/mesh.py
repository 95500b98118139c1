"""Chooses the devices that share a model, before anything of it is loaded."""

from __future__ import annotations

import os

import jax
from jax.sharding import Mesh

from levserve.errors import ConfigError
from levserve.model.config import ModelConfig
from levserve.model.placement import make_mesh
from levserve.model.sharding import indivisible_reason, largest_count
from levserve.settings.settings import Settings

HOST_DEVICES = "xla_force_host_platform_device_count"


def prepare_cpu_devices(settings: Settings) -> None:
    """Has jax divide a CPU into as many devices as are asked for, if jax has not looked for devices yet.

    They share its cores and its memory, so that this is for trials and tests.
    """
    count = max(settings.tensor_parallel, settings.most_devices)
    if count < 2 or HOST_DEVICES in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # jax has its devices; `choose_mesh` says if there are too few


def choose_mesh(settings: Settings, config: ModelConfig) -> Mesh | None:
    """The devices that share the model, or None if one has all of it; raises `ConfigError`."""
    found = jax.devices()
    count = settings.tensor_parallel or largest_count(config, len(found))
    if count > len(found):
        kind = f"{found[0].platform} device{'s' if len(found) > 1 else ''}"
        raise ConfigError(f"--tensor-parallel {count}: jax finds only {len(found)} {kind}")
    reason = indivisible_reason(config, count)
    if reason is not None:
        raise ConfigError(f"--tensor-parallel {count} does not fit the model: {reason}")
    return make_mesh(found[:count])
