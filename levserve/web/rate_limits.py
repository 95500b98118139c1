"""Shows a client what is left of the server's limits, in the headers that OpenAI's clients read."""

from __future__ import annotations

import math

from flask import Response

from levserve.engine.admission import Admission


def show_limits(admission: Admission, response: Response) -> None:
    room = admission.room()
    for kind, limit, free in (
        ("requests", room.max_requests, room.free_requests),
        ("tokens", room.max_tokens, room.free_tokens),
    ):
        if not limit:  # the memory for tokens is unknown until a model is loaded
            continue
        response.headers[f"x-ratelimit-limit-{kind}"] = str(limit)
        response.headers[f"x-ratelimit-remaining-{kind}"] = str(free)
        if room.drain_seconds is not None:
            response.headers[f"x-ratelimit-reset-{kind}"] = f"{math.ceil(room.drain_seconds * 1000)}ms"
