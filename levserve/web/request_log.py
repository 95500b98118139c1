"""What is known of one request, reported at its end: a log line, metrics and, if tracing is on, a span.

At debug level, its beginning is logged too.

Filled on the request's HTTP thread. Never holds text that a client sent or received.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from levserve.answers.answer import Timings
from levserve.answers.timings import make_timings
from levserve.errors import ServeError
from levserve.generation import Choice, Deltas
from levserve.observe.metrics import Metrics
from levserve.observe.tracing import Tracing
from levserve.web.ops import OPS_PATHS
from levserve.web.static_files import STATIC_PATHS

log = logging.getLogger(__name__)

CLIENT_LEFT = 499


@dataclass(slots=True, eq=False)
class RequestLog:
    """Times are on `time.monotonic`'s clock."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.monotonic)
    route: str = "unknown"
    status: int = 0
    model: str | None = None
    prompt_tokens: int = 0
    choices: Sequence[Choice] = ()
    deltas: list[Deltas] = field(default_factory=list)
    submitted: float | None = None
    error: str | None = None
    abort: str | None = None
    """Why the client got no complete answer, if that was the client's own doing."""
    carrier: Mapping[str, str] = field(default_factory=dict)
    """The headers in which the client says which trace the request belongs to."""

    @property
    def placed(self) -> float | None:
        """When the first of its sequences got a row."""
        times = (deltas.placed_at for deltas in self.deltas)
        return min((moment for moment in times if moment is not None), default=None)

    @property
    def first_token(self) -> float | None:
        times = (deltas.first_token_at for deltas in self.deltas)
        return min((moment for moment in times if moment is not None), default=None)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def finish_reasons(self) -> list[str]:
        return sorted({choice.finish.value for choice in self.choices if choice.finish is not None})

    def begin(self) -> None:
        if log.isEnabledFor(logging.DEBUG):
            shown = {"request_id": self.request_id, "method": self.method, "path": self.path}
            log.debug("%s %s %s started", *shown.values(), extra={"message_fields": shown})

    def note_work(self, model: str, prompt_tokens: int, choices: Sequence[Choice]) -> None:
        self.model, self.prompt_tokens, self.choices = model, prompt_tokens, choices

    def note_error(self, error: ServeError) -> None:
        if error.status == CLIENT_LEFT:
            self.abort = error.code or "disconnected"
        else:
            self.error = error.code or error.type

    def timings(self, now: float | None = None) -> Timings:
        """Where the time went up to now. A phase that has not begun took none."""
        return make_timings(
            time.monotonic() if now is None else now,
            started=self.started,
            submitted=self.submitted,
            placed=self.placed,
            first_token=self.first_token,
            num_tokens=self.completion_tokens,
        )

    def end(self, status: int, metrics: Metrics, tracing: Tracing | None) -> None:
        """Reports the request, when its last byte is written or its client has gone."""
        ended = time.monotonic()
        self.status = status
        if self.error is None and any(choice.finish is None for choice in self.choices):
            # A write failed before the watcher saw the client leave.
            self.abort = self.abort or "disconnected"
        if self.abort == "disconnected":
            metrics.disconnects.labels(self._phase()).inc()
        if tracing is not None:
            tracing.export(self, ended)
        self._log(ended)

    def _log(self, ended: float) -> None:
        # Opening the page requests two dozen files.
        is_quiet = self.path.encode() in OPS_PATHS or self.path.startswith(STATIC_PATHS)
        level = logging.DEBUG if is_quiet else logging.INFO
        if not log.isEnabledFor(level):
            return
        shown = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "ms": round((ended - self.started) * 1000),
        }
        extra = {"message_fields": shown, "fields": self._fields(ended)}
        log.log(level, "%s %s %s %s %d ms", *shown.values(), extra=extra)

    def _fields(self, ended: float) -> dict[str, object]:
        fields: dict[str, object] = {}
        if self.submitted is not None:
            timings = self.timings(ended)
            fields = {
                "model": self.model,
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "queue_ms": timings.queue_ms,
                "prefill_ms": timings.prefill_ms,
                "decode_ms": timings.decode_ms,
                "tokens_per_second": timings.tokens_per_second,
                "finish_reason": ",".join(self.finish_reasons) or None,
            }
        if self.error is not None:
            fields["error"] = self.error
        if self.abort is not None:
            fields["abort"] = self.abort
        return fields

    def _phase(self) -> str:
        if self.placed is None:
            return "queued"
        return "prefill" if self.first_token is None else "decode"
