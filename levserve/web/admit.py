"""A request's first steps: is there room for it, and how long may it take. Called in views, on HTTP threads.

`admit` comes before anything of the body is read. What it counts is told to the client on every answer, in the headers that
OpenAI's clients look for.
"""

from __future__ import annotations

import math

from flask import Response, g, request

from levserve.engine.admission import Reservation
from levserve.engine.engine import Engine
from levserve.errors import BadRequest

TIMEOUT_HEADER = "x-request-timeout-ms"


def admit(engine: Engine) -> Reservation:
    """A place for the request, or `Overloaded` or `Unavailable` at once."""
    g.is_limited = True
    return engine.reserve(request.content_length or 0)


def asked_timeout() -> float | None:
    """The seconds that the client's header gives the request, if it has one."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise BadRequest(
            f"The header {TIMEOUT_HEADER} must be a number of milliseconds above 0.", param=TIMEOUT_HEADER
        )
    return milliseconds / 1000


def show_limits(engine: Engine, response: Response) -> None:
    """Adds what is left to the answer of a request that asked for a place."""
    if not g.get("is_limited"):
        return
    room = engine.admission.room()
    for kind, limit, free in (
        ("requests", room.max_requests, room.free_requests),
        ("tokens", room.max_tokens, room.free_tokens),
    ):
        response.headers[f"x-ratelimit-limit-{kind}"] = str(limit)
        response.headers[f"x-ratelimit-remaining-{kind}"] = str(free)
        if room.drain_seconds is not None:
            response.headers[f"x-ratelimit-reset-{kind}"] = f"{math.ceil(room.drain_seconds * 1000)}ms"
