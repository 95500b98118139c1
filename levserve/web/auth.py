"""Checks the API key before every request except the health routes, on the request's HTTP thread.

The page for browsers and its files are open too: they hold no secrets, and a browser cannot send a key when
it opens an address. The page asks for the key and sends it with its API calls. Paths under /admin have their
own keys: a client's key does not open them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from flask import g, request

from levserve.errors import Forbidden, Unauthorized
from levserve.settings.settings import Settings
from levserve.web.page import is_for_page

OPEN_PATHS = frozenset(("/healthz", "/readyz", "/health"))  # a probe has no key
METRICS_PATHS = frozenset(("/metrics", "/metrics/router"))  # open if --open-metrics says so
ADMIN_PATHS = "/admin/"
# A web page cannot set headers on a WebSocket, only offer subprotocols; OpenAI's clients send the key in this
# one.
KEY_SUBPROTOCOL = "openai-insecure-api-key."
OWNER_DIGITS = 32
KEY_HEADER = "x-api-key"  # where Anthropic's clients send it


def key_check(settings: Settings) -> Callable[[], None]:
    """For Flask's `before_request`: raises `Unauthorized` where a needed key is missing or wrong."""
    client_keys = [_digest(key) for key in settings.api_keys]
    admin_keys = [_digest(key) for key in settings.admin_keys]
    open_paths = OPEN_PATHS | METRICS_PATHS if settings.open_metrics else OPEN_PATHS

    def check_key() -> None:
        is_admin = request.path.startswith(ADMIN_PATHS)
        wanted = admin_keys if is_admin else client_keys
        if is_admin and not wanted:
            raise Forbidden(
                "The admin endpoints are off; set LEVSERVE_ADMIN_KEY or --admin-key-file to open them."
            )
        if not wanted or request.path in open_paths or (settings.ui and is_for_page()):
            return
        given = _given_key()
        if not given:
            raise Unauthorized(
                "You didn't provide an API key. Send it in the header 'Authorization: Bearer KEY'."
            )
        digest = _digest(given)
        # All keys are compared, so that the time does not depend on which one matches.
        num_matches = sum(hmac.compare_digest(digest, key) for key in wanted)
        if not num_matches:
            raise Unauthorized(f"Incorrect API key provided: {_mask(given)}.")
        g.key_digest = digest

    return check_key


def key_owner() -> str:
    """An id for the request's key, which does not reveal the key; empty if none was needed."""
    digest: bytes = g.get("key_digest", b"")
    # Hashed again with its own prefix, because owners are written to files.
    return hashlib.sha256(b"owner:" + digest).hexdigest()[:OWNER_DIGITS] if digest else ""


def _given_key() -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    if found := request.headers.get(KEY_HEADER, "").strip():
        return found
    if request.headers.get("Upgrade", "").lower() == "websocket":
        for name in request.headers.get("Sec-WebSocket-Protocol", "").split(","):
            if name.strip().startswith(KEY_SUBPROTOCOL):
                return name.strip().removeprefix(KEY_SUBPROTOCOL)
    return ""


def _digest(key: str) -> bytes:
    """All digests have the same length, so the time of a comparison does not depend on the key's length."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _mask(key: str) -> str:
    return f"{key[:3]}***{key[-2:]}" if key.isascii() and len(key) >= 12 else "***"
