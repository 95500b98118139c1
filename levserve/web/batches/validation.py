"""Checks the input of a batch before it runs: an error in a line's envelope fails the whole batch.

An error in a request's body is found when the request runs, and is reported in its result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from levserve.batch.line import InputLine, RequestLine, read_line
from levserve.errors import ServeError
from levserve.web.batches.objects import LineProblem

MAX_PROBLEMS = 50


class Inspection(NamedTuple):
    num_requests: int
    problems: list[LineProblem]


def inspect_lines(
    lines: Iterable[InputLine], endpoint: str, max_requests: int, max_body_bytes: int
) -> Inspection:
    """Stops after `MAX_PROBLEMS`. All ids are kept, so `max_requests` bounds the memory too."""
    problems: list[LineProblem] = []
    seen: set[str] = set()
    count = 0
    for line in lines:
        count += 1
        if count > max_requests:
            message = f"The file has more than the {max_requests} requests that a batch may have."
            problems.append(LineProblem("too_many_requests", message))
            break
        problem = _inspect(line, endpoint, max_body_bytes, seen)
        if problem is not None:
            problems.append(problem)
            if len(problems) >= MAX_PROBLEMS:
                break
    if not count:
        problems.append(LineProblem("empty_file", "The file has no requests."))
    return Inspection(count, problems)


def _inspect(line: InputLine, endpoint: str, max_body_bytes: int, seen: set[str]) -> LineProblem | None:
    try:
        request = read_line(line, max_body_bytes)
    except ServeError as error:
        code = error.code or "invalid_json_line"
        return LineProblem(code, error.message, line.number, error.param)
    problem = _check(request, endpoint, seen)
    seen.add(request.custom_id)
    if problem is None:
        return None
    code, message, param = problem
    return LineProblem(code, message, line.number, param)


def _check(request: RequestLine, endpoint: str, seen: set[str]) -> tuple[str, str, str] | None:
    if request.custom_id in seen:
        shown = request.custom_id[:64]
        return "duplicate_custom_id", f"An earlier line has the custom_id '{shown}' too.", "custom_id"
    if request.method != "POST":
        return "invalid_method", "'method' must be \"POST\".", "method"
    if request.url != endpoint:
        return "invalid_url", f"The url '{request.url[:64]}' is not the batch's endpoint {endpoint}.", "url"
    return None
