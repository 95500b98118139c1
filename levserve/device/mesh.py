"""Chooses the devices that share a model, before any of it is loaded."""

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

    They share its cores and its memory, so this is only for trials and tests.
    """
    count = max(settings.tensor_parallel, settings.most_devices) // settings.num_hosts
    if count < 2 or HOST_DEVICES in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # jax has its devices; `choose_mesh` says if there are too few


def choose_mesh(settings: Settings, config: ModelConfig) -> Mesh | None:
    """The devices that share the model, or None if one device has all of it; raises `ConfigError`."""
    found = jax.devices()
    num_hosts = settings.num_hosts
    count = settings.tensor_parallel or largest_count(config, len(found), num_hosts)
    if count > len(found):
        kind = f"{found[0].platform} device{'s' if len(found) > 1 else ''}"
        raise ConfigError(f"--tensor-parallel {count}: jax finds only {len(found)} {kind}")
    reason = indivisible_reason(config, count)
    if reason is not None:
        raise ConfigError(f"--tensor-parallel {count} does not fit the model: {reason}")
    return make_mesh(_devices_of_each(num_hosts, count // num_hosts))


def _devices_of_each(num_hosts: int, count: int) -> list[jax.Device]:
    """The first devices of each host, host after host."""
    devices: list[jax.Device] = []
    for host_id in range(num_hosts):
        own = [device for device in jax.devices() if device.process_index == host_id]
        if len(own) < count:
            raise ConfigError(f"host {host_id} has {len(own)} of the {count} devices that each host needs")
        devices += own[:count]
    return devices
