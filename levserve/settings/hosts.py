"""Replaces `--coordinator auto` by what the cluster says, and checks the settings of several hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from levserve.errors import ConfigError
from levserve.settings.cluster import find_place
from levserve.settings.settings import Settings

AUTO = "auto"
MAX_PORT = 65534
"""jax's own service uses the next port."""


def resolve_hosts(settings: Settings, environ: Mapping[str, str], notes: list[str]) -> Settings:
    """The settings with this host's place in them; raises `ConfigError` for an impossible place."""
    if settings.coordinator.lower() == AUTO:
        settings = _find(settings, environ, notes)
    elif settings.coordinator and "num_hosts" not in settings.sources:
        raise ConfigError(f"{_shown(settings, 'coordinator')} needs --num-hosts: how many hosts there are")
    if settings.host_id is not None and settings.host_id >= settings.num_hosts:
        raise ConfigError(
            f"{_shown(settings, 'host_id')} must be below --num-hosts {settings.num_hosts}: "
            "hosts are counted from 0"
        )
    if settings.num_hosts > 1:
        _check_place(settings)
        _check_uses(settings)
        return _share(settings)
    return settings


def split_address(coordinator: str) -> tuple[str, int]:
    """Host and port; an IPv6 address is in brackets. Raises `ValueError` for anything else."""
    host, colon, port = coordinator.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address needs brackets")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= MAX_PORT:
        raise ValueError("host:port is needed")
    return host, int(port)


def _find(settings: Settings, environ: Mapping[str, str], notes: list[str]) -> Settings:
    """Settings that are given beside `auto` override what is found."""
    place = find_place(environ)
    found: dict[str, Any] = {
        "coordinator": place.coordinator,
        "num_hosts": place.num_hosts,
        "host_id": place.host_id,
    }
    for name in ("num_hosts", "host_id"):
        if name in settings.sources:
            del found[name]
    source = f"auto, {place.source}"
    settings = replace(settings, **found, sources={**settings.sources, **dict.fromkeys(found, source)})
    notes.append(
        f"--coordinator auto: host {settings.host_id} of {settings.num_hosts}, which meet at "
        f"{settings.coordinator} ({place.source})"
    )
    return settings


def _check_place(settings: Settings) -> None:
    asked = _shown(settings, "num_hosts")
    if not settings.coordinator:
        raise ConfigError(f"{asked} needs --coordinator host:port, the address of host 0")
    if settings.host_id is None:
        raise ConfigError(
            f"{asked} needs --host-id, from 0 to {settings.num_hosts - 1} and different on each host"
        )
    try:
        _, port = split_address(settings.coordinator)
    except ValueError:
        raise ConfigError(
            f"{_shown(settings, 'coordinator')} must be host:port with a port from 1 to {MAX_PORT}, or auto"
        ) from None
    if settings.host_id == 0 and settings.port in (port, port + 1):
        raise ConfigError(
            f"{_shown(settings, 'coordinator')} takes the ports {port} and {port + 1} of host 0, "
            f"so {_shown(settings, 'port')} must be another one"
        )


def _check_uses(settings: Settings) -> None:
    """Refuses what several hosts cannot do: they serve one model that is loaded at the start."""
    asked = _shown(settings, "num_hosts")
    if settings.draft_model:
        raise ConfigError(f"{asked} excludes {_shown(settings, 'draft_model')}: a draft model needs one host")
    if settings.models:
        raise ConfigError(f"{asked} serves one model, and the settings file has sections for several")
    for name in ("models_dir", "lazy"):
        if getattr(settings, name):
            raise ConfigError(
                f"{asked} serves one model from the start and excludes {_shown(settings, name)}"
            )
    if settings.dry_run:
        raise ConfigError(f"--dry-run tries a model on one host alone and excludes {asked}")


def _share(settings: Settings) -> Settings:
    """All devices of all hosts share the model, unless --tensor-parallel gives a number."""
    if "tensor_parallel" not in settings.sources:
        return replace(settings, tensor_parallel=0)
    if settings.tensor_parallel % settings.num_hosts:
        raise ConfigError(
            f"{_shown(settings, 'tensor_parallel')} counts the devices of all hosts and must be a multiple "
            f"of --num-hosts {settings.num_hosts}"
        )
    return settings


def _shown(settings: Settings, name: str) -> str:
    (row,) = [row for row in settings.describe() if row.name == name]
    return f"--{name.replace('_', '-')} {row.value} ({row.source})"
