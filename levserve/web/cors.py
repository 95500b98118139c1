"""Tells browsers which web pages may call this server: none, unless the operator lists their origins.

A browser first asks without the key ("preflight"), and shows a page only those answers, errors included, that
name its origin. Runs on HTTP threads, before and after the views.
"""

from __future__ import annotations

from collections.abc import Collection

from flask import Flask, Response, request

from levserve.errors import Forbidden

PREFLIGHT_SECONDS = 600
# The headers that a page may read besides the usual ones.
READABLE = ", ".join(
    (
        "x-request-id",
        "request-id",
        "openai-processing-ms",
        "retry-after",
        "retry-after-ms",
        "x-should-retry",
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-requests",
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-tokens",
    )
)


class Cors:
    """The operator's list of origins; shared by all HTTP threads."""

    def __init__(self, origins: Collection[str], *, with_credentials: bool = False) -> None:
        self._origins = frozenset(origins)
        self._with_credentials = with_credentials

    def install(self, app: Flask) -> None:
        """Adds the hooks. Call it before the key check is added: a preflight carries no key."""
        if self._origins:
            app.before_request(self._answer_preflight)
            app.after_request(self._name_origin)

    def check_origin(self, what: str = "WebSocket") -> None:
        """Raises `Forbidden` for an unlisted page: browsers open WebSockets and send forms without asking.

        The server's own pages are known by a header of the browser that no page can set.
        """
        origin = request.headers.get("Origin")
        is_own = request.headers.get("Sec-Fetch-Site") == "same-origin"
        if origin is not None and not is_own and not self._allows(origin):
            raise Forbidden(f"This server accepts no {what} from pages of this origin; see --cors-origins.")

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins

    def _answer_preflight(self) -> Response | None:
        origin = request.headers.get("Origin")
        if request.method != "OPTIONS" or origin is None:
            return None
        if "Access-Control-Request-Method" not in request.headers:
            return None
        response = Response(status=204)
        if self._allows(origin):
            asked = request.headers.get("Access-Control-Request-Headers", "")
            response.headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE, OPTIONS"
            response.headers["Access-Control-Allow-Headers"] = asked
            response.headers["Access-Control-Max-Age"] = str(PREFLIGHT_SECONDS)
        return response

    def _name_origin(self, response: Response) -> Response:
        response.vary.add("Origin")
        origin = request.headers.get("Origin")
        if origin is not None and self._allows(origin):
            response.headers["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
            response.headers["Access-Control-Expose-Headers"] = READABLE
            if self._with_credentials:
                response.headers["Access-Control-Allow-Credentials"] = "true"
        return response
