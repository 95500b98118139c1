"""The exceptions of levserve, each with the HTTP answer it becomes.

    ServeError                 500  server_error
    ├── Poisoned               500  non_finite_output: for this request only
    ├── BadRequest             400  invalid_request_error, with the field in `param`
    │   └── ContextTooLong     400  context_length_exceeded
    ├── Unauthorized           401  invalid_api_key
    ├── Forbidden              403
    ├── NotFound               404
    │   └── ModelNotFound      404  model_not_found
    ├── RequestTimeout         408  request_timeout
    ├── Conflict               409  not possible in the server's present state
    ├── BodyTooLarge           413  body_too_large
    ├── UpgradeRequired        426
    ├── RetryLater                  with Retry-After
    │   ├── Overloaded         429  rate_limit_exceeded
    │   └── Unavailable        503  unavailable: loading, draining, stalled or failed
    └── DeadlineExceeded       504  deadline_exceeded
    StartupError               the process ends with exit code 1 and one line
    └── ConfigError            the same with exit code 2

Views raise these; one handler in `web/app.py` answers with `body` and `headers`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

NO_RETRY = {"x-should-retry": "false"}
"""Keeps OpenAI's SDK from repeating a request that would fail again."""


class ServeError(Exception):
    """A request that ends without an answer; the message is a sentence that a client can act on."""

    status = 500
    type = "server_error"
    code: str | None = None
    headers: Mapping[str, str] = {}
    """What the error adds to the headers of its answer."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code

    def body(self) -> bytes:
        """OpenAI's error object, as JSON."""
        detail = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": detail}, separators=(",", ":")).encode()


class Poisoned(ServeError):
    """The model computed non-finite values for a request."""

    code = "non_finite_output"
    headers = NO_RETRY


class BadRequest(ServeError):
    status = 400
    type = "invalid_request_error"


class ContextTooLong(BadRequest):
    """Clients match on the words "maximum context length"."""

    code = "context_length_exceeded"

    def __init__(
        self, num_tokens: int, max_tokens: int, max_seq_len: int, *, param: str, at_least: str = ""
    ) -> None:
        super().__init__(
            f"This model's maximum context length is {max_seq_len} tokens. "
            f"However, you requested {at_least}{num_tokens + max_tokens} tokens "
            f"({num_tokens} in the prompt, {max_tokens} for the completion). "
            "Please shorten the prompt or the completion.",
            param=param,
        )
        self.num_tokens = num_tokens + max_tokens
        self.max_seq_len = max_seq_len


class Unauthorized(ServeError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    headers = {"WWW-Authenticate": "Bearer"}


class Forbidden(ServeError):
    status = 403
    type = "invalid_request_error"


class NotFound(ServeError):
    status = 404
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class RequestTimeout(ServeError):
    """The client took too long to send its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Conflict(ServeError):
    status = 409
    type = "invalid_request_error"
    headers = NO_RETRY


class BodyTooLarge(ServeError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"

    def __init__(self, max_bytes: int, what: str = "body") -> None:
        super().__init__(f"The {what} is larger than this server's limit of {max_bytes} bytes.")


class UpgradeRequired(ServeError):
    """The path needs a WebSocket, and the request does not open one."""

    status = 426
    type = "invalid_request_error"
    headers = {"Upgrade": "websocket", "Sec-WebSocket-Version": "13"}


class RetryLater(ServeError):
    """A refusal of a request that may succeed later; `retry_after_seconds` becomes the Retry-After header."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.headers = {
            "Retry-After": str(math.ceil(retry_after_seconds)),
            "retry-after-ms": str(math.ceil(retry_after_seconds * 1000)),
        }


class Overloaded(RetryLater):
    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class Unavailable(RetryLater):
    status = 503
    type = "server_error"
    code = "unavailable"


class DeadlineExceeded(ServeError):
    status = 504
    type = "server_error"
    code = "deadline_exceeded"
    headers = NO_RETRY


def cause_of(error: BaseException) -> str:
    """What went wrong, without the number and the path that Python writes around the system's message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


FAULT_EXIT_CODE = 70  # EX_SOFTWARE
"""The exit code of a process that failed while it served; systemd and Kubernetes restart it."""


class StartupError(Exception):
    """The server cannot start; the message is one line that says why."""

    exit_code = 1


class ConfigError(StartupError):
    """An invalid setting; the message names the option, its source and its value."""

    exit_code = 2


def startup_error(message: str, exit_code: int) -> StartupError:
    """The error of another process, which has told its message and its exit code."""
    return ConfigError(message) if exit_code == ConfigError.exit_code else StartupError(message)
