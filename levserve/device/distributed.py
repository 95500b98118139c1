"""Connects jax's processes on several hosts, so that their devices share a model like those of one host.

Called before anything looks at jax's devices, on the device thread. The hosts have found each other by then
(`hosts`), so jax waits only for a moment.
"""

from __future__ import annotations

import logging

import jax

from levserve.errors import StartupError
from levserve.hosts.listener import listen_everywhere
from levserve.settings.hosts import split_address
from levserve.settings.settings import Settings

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60
SILENT_SECONDS = 60
"""After so long without a heartbeat jax aborts the process. Our own check (`hosts.peer`) is quicker and says
which host was lost."""


def start_distributed(settings: Settings) -> None:
    """Connects to the other hosts, once; raises `StartupError` if that fails."""
    if jax.distributed.is_initialized():
        return
    host, port = split_address(settings.coordinator)
    address = f"[{host}]" if ":" in host else host
    if settings.host_id == 0:
        _check_port(port + 1)
    # This service would take SIGTERM from the server, which drains on it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            f"{address}:{port + 1}",
            settings.num_hosts,
            settings.host_id,
            cluster_detection_method="deactivate",
            initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=SILENT_SECONDS,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise StartupError(
            f"jax's processes do not find each other at {address}:{port + 1}: {reason}"
        ) from error
    log.info("jax runs on %d hosts, and this is host %d", settings.num_hosts, settings.host_id)


def _check_port(port: int) -> None:
    """Raises `StartupError` if the port is taken; jax's service would end the process with SIGSEGV."""
    try:
        listen_everywhere(port).close()
    except OSError as error:
        raise StartupError(
            "jax's service needs the port after --coordinator's, but host 0 cannot listen on "
            f"{port}: {error.strerror}"
        ) from None
