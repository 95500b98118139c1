"""Lets in who brings the key. One check before every request but the health routes, on the request's HTTP thread."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from flask import request

from levserve.errors import Unauthorized

OPEN_PATHS = frozenset(("/healthz", "/readyz", "/health"))  # a probe has no key


def key_check(api_key: str) -> Callable[[], None]:
    """A check for Flask's `before_request`: raises `Unauthorized` unless the request carries this key; none is asked for ""."""
    wanted = _digest(api_key)

    def check_key() -> None:
        if not api_key or request.path in OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        given = given.strip()
        if scheme.lower() != "bearer" or not given:
            raise Unauthorized("You didn't provide an API key. Send it in the header 'Authorization: Bearer KEY'.")
        if not hmac.compare_digest(_digest(given), wanted):
            raise Unauthorized(f"Incorrect API key provided: {_mask(given)}.")

    return check_key


def _digest(key: str) -> bytes:
    """Equal lengths, so that the time of the comparison says nothing about the key, not even how long it is."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _mask(key: str) -> str:
    return f"{key[:3]}***{key[-2:]}" if key.isascii() and len(key) >= 12 else "***"
