"""Tells browsers which web pages may call this server: none, unless the operator names their origins.

A browser asks first, without the key ("preflight"), and shows a page only the answers that name its origin, errors
included. Runs on HTTP threads, before and after the views.
"""

from __future__ import annotations

from collections.abc import Collection

from flask import Flask, Response, request

from levserve.errors import Forbidden

PREFLIGHT_SECONDS = 600
LIMITS = [
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
]
# What a page may read beyond the usual.
READABLE = ", ".join(
    ["x-request-id", "openai-processing-ms", "retry-after", "retry-after-ms", "x-should-retry", *LIMITS]
)


class Cors:
    """The operator's list of origins; shared by all HTTP threads."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def install(self, app: Flask) -> None:
        """Adds the hooks; call it before the key check is added, which a preflight must not meet."""
        if self._origins:
            app.before_request(self._answer_preflight)
            app.after_request(self._name_origin)

    def check_origin(self) -> None:
        """For a WebSocket, which browsers open from any page without asking: raises `Forbidden` for a page's origin not in the list."""
        origin = request.headers.get("Origin")
        if origin is not None and not self._allows(origin):
            raise Forbidden("This server takes no WebSocket from pages of this origin; see --cors-origins.")

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins

    def _answer_preflight(self) -> Response | None:
        if (
            request.method != "OPTIONS"
            or "Origin" not in request.headers
            or "Access-Control-Request-Method" not in request.headers
        ):
            return None
        response = Response(status=204)
        if self._allows(request.headers["Origin"]):
            response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
            response.headers["Access-Control-Allow-Headers"] = request.headers.get(
                "Access-Control-Request-Headers", ""
            )
            response.headers["Access-Control-Max-Age"] = str(PREFLIGHT_SECONDS)
        return response

    def _name_origin(self, response: Response) -> Response:
        response.vary.add("Origin")
        origin = request.headers.get("Origin")
        if origin is not None and self._allows(origin):
            response.headers["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
            response.headers["Access-Control-Expose-Headers"] = READABLE
        return response
