"""Errors in the shape of Anthropic's API, for its paths only.

The statuses are those of this server's other paths: 429 if its queue is full, and 503, where Anthropic uses
529, while it loads, drains or has failed.
"""

from __future__ import annotations

import msgspec

from levserve.errors import ContextTooLong, ServeError
from levserve.web.messages.objects import ErrorText, MessageError

PATH = "/v1/messages"
REQUEST_ID_HEADER = "request-id"
"""Where Anthropic's clients look for the id of a request."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def error_body(error: ServeError, status: int, request_id: str) -> bytes:
    return msgspec.json.encode(make_error(error, status, request_id))


def make_error(error: ServeError, status: int, request_id: str) -> MessageError:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return MessageError(ErrorText(kind, _explain(error)), request_id)


def _explain(error: ServeError) -> str:
    if isinstance(error, ContextTooLong):
        # Coding tools look for these words, and then shorten the conversation.
        return f"prompt is too long: {error.num_tokens} tokens > {error.max_seq_len} maximum. {error.message}"
    return error.message
