"""What is checked before jax connects the processes of several hosts."""

from __future__ import annotations

import socket

import jax
import pytest

from levserve.device.distributed import start_distributed
from levserve.errors import StartupError
from levserve.settings.settings import Settings


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_of_jaxs_service_that_is_taken_is_one_line(address: str) -> None:
    """The service would end the process with SIGSEGV."""
    with socket.create_server((address, 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(coordinator=f"127.0.0.1:{port - 1}", num_hosts=2, host_id=0)
        with pytest.raises(StartupError, match=f"cannot listen on {port}: Address already in use"):
            start_distributed(settings)
    assert not jax.distributed.is_initialized()
