"""Opens the port of host 0, on the address by which the other hosts know it."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

from levserve.errors import StartupError

log = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Opens the port on the address that the other hosts use.

    Many machines resolve their own name to a loopback address, which no other host could reach.
    """
    try:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            # A cluster may publish the name of a pod only some time after the pod was started.
            log.warning("%s is not known here (%s); listening on all addresses", host, error.strerror)
            return listen_everywhere(port)
        given = address[0]
        if ipaddress.ip_address(given).is_loopback and host not in ("localhost", given):
            given = ""
        try:
            return socket.create_server((given, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # This machine does not have the address: it is translated on the way here.
            return socket.create_server(("", port), family=family)
    except OSError as error:
        raise StartupError(f"--coordinator {host}:{port}: cannot listen there: {error.strerror}") from None


def listen_everywhere(port: int) -> socket.socket:
    """Opens the port on all addresses of this machine. Raises `OSError`."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
