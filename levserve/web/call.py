"""One request on its way from its body to its answer: what every endpoint that runs a model needs.

Views begin a call, and so does each message on a WebSocket:

    with calls.begin() as call:
        body = call.read(CompletionBody)                  # reserves a place, then reads and checks the body
        run = call.start(body, call.get_model(body.model))  # waits for the model, tokenizes, submits

Everything here runs on HTTP threads.
"""

from __future__ import annotations

import itertools
import math
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from flask import Response, g, request

from levserve.engine.admission import Reservation
from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest
from levserve.generation import Choice, ClientGone, Deltas
from levserve.models.handle import ModelHandle
from levserve.models.registry import Registry
from levserve.request.decode import Body, decode
from levserve.request.policy import Policy
from levserve.request.schema import GenerationBody
from levserve.request.submission import Seeds, count_reserved, prepare
from levserve.request.truncation import Truncation
from levserve.request.waves import split_waves
from levserve.schedule.request import GenerationRequest
from levserve.settings.settings import Settings
from levserve.text.stops import StopStrings
from levserve.web.json_body import read_body
from levserve.web.request_log import RequestLog
from levserve.web.run import Run
from levserve.web.watcher import Watcher

TIMEOUT_HEADER = "x-request-timeout-ms"
MAX_SECONDS = 1e6  # longer timeouts count as this much: Python refuses to wait 1e10 seconds


class Calls:
    """Begins calls, and holds what they share; used by all HTTP threads."""

    def __init__(self, registry: Registry, settings: Settings, watcher: Watcher) -> None:
        self.registry = registry
        self.engine = registry.engine
        self.settings = settings
        self.watcher = watcher
        self.seeds = Seeds(settings.seed)
        self.numbers = itertools.count()

    def begin(self) -> Call:
        """A call for the HTTP request that this thread handles."""
        # Flask's test client has no socket.
        return Call(self, g.request_log, request.environ.get("gunicorn.socket"))

    def policy_of(self, model: ServedModel) -> Policy:
        """The policy for requests to this model, which may have its own section in the configuration."""
        return Policy.of(self.settings.models.get(model.name, self.settings))


class Call:
    """One request: its log, its place in the queue, its deadline, its client, and all it holds until its end.

    Leaving the `with` block gives everything back, unless the answer is a stream: then the end of the stream
    does. Belongs to one HTTP thread.
    """

    def __init__(self, calls: Calls, request_log: RequestLog, client: socket.socket | None = None) -> None:
        self.request_log = request_log
        self.client = client
        """The client's socket, to be watched for a hang-up while the request waits."""
        self.deadline: float | None = None
        self.model_name = ""
        """Which of the borrowed model's names the request used; the answer's `model`."""
        # Two requests may carry the same id at the same time; the engine's ids are unique.
        self.engine_id = f"{request_log.request_id}.{next(calls.numbers)}"
        self.settings = calls.settings
        self._calls = calls
        self._reservation: Reservation | None = None
        self._held = ExitStack()
        self._is_streaming = False

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_streaming:
            self._held.close()

    def close_with(self, response: Response) -> None:
        """Holds everything until the response's last byte is written or its client has gone.

        The stream's own `finally` cannot do this: a generator that was never started does not run it.
        """
        self._is_streaming = True
        response.call_on_close(self._held.close)

    def read(self, kind: type[Body]) -> Body:
        """The checked body. Reserves a place before reading it, or raises `Overloaded` or `Unavailable`."""
        g.has_rate_limits = True
        self.reserve(request.content_length or 0)
        body = decode(read_body(self.settings.max_body_bytes), kind)
        self.set_deadline(header_timeout(), getattr(body, "timeout", None))
        return body

    def reserve(self, num_bytes: int) -> None:
        """Takes a place in the queue for a body of this size; raises `Overloaded` or `Unavailable`."""
        self._reservation = self._held.enter_context(self._calls.engine.reserve(num_bytes))

    def set_deadline(self, *timeouts: float | None) -> None:
        """Sets the deadline: the arrival plus the shortest of these timeouts and the server's own."""
        given = [seconds for seconds in (self.settings.request_timeout, *timeouts) if seconds]
        self.deadline = self.request_log.started + min(*given, MAX_SECONDS) if given else None

    def get_model(self, name: str | None) -> ServedModel:
        """The model of this name, or the default one; waits until it is loaded or the deadline has passed."""
        handle = self.borrow(name)
        self.wait(handle)
        return handle.model

    def borrow(self, name: str | None) -> ModelHandle:
        """Holds the model until the end of the call; it may still be loading."""
        handle = self._held.enter_context(self._calls.registry.borrow(name))
        self.model_name = handle.name
        return handle

    def wait(self, handle: ModelHandle, timeout_seconds: float | None = None) -> bool:
        """Waits; whether, within this time, the model was loaded, failed to load, or the deadline passed.

        Raises `ClientGone` if the client hangs up.
        """
        if handle.wait(0):
            return True
        deadline = math.inf if self.deadline is None else self.deadline
        until = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        seconds = max(min(until, deadline) - time.monotonic(), 0)
        with ExitStack() as watching:
            self._watch(handle.abandon, watching)
            is_decided = handle.wait(None if seconds == math.inf else seconds)
        if handle.is_abandoned:
            raise ClientGone("The client closed the connection.")
        return is_decided or time.monotonic() >= deadline

    def start(self, body: GenerationBody, model: ServedModel) -> Run:
        """Hands the sequences of a checked body to the engine."""
        policy = self._calls.policy_of(model)
        body, warnings = policy.apply_to(body)
        self._grow_to(body.num_prompts * body.num_sequences, 0, body.choices_param)
        prompts, requests, choices, cuts = prepare(
            body, model, self._calls.seeds, self.engine_id, self.deadline, policy
        )
        self._grow_to(len(requests), count_reserved(requests, body, model), "max_tokens")
        self.request_log.note_work(model.name, sum(map(len, prompts)), choices)
        deltas = self._submit(requests, choices, model, self._held)
        return Run(
            body,
            model,
            prompts,
            choices,
            deltas,
            self.request_log,
            self.model_name,
            warnings + cuts,
        )

    def truncation(self, asked: int | None, model: ServedModel) -> Truncation:
        """How to truncate prompts for this model; `asked` is the request's `truncate_prompt_tokens`."""
        return Truncation(asked, self._calls.policy_of(model).truncates_prompts)

    def compute(self, requests: Sequence[GenerationRequest], model: ServedModel) -> list[Choice]:
        """Runs sequences that generate nothing, one wave at a time; returns their ended choices, in order."""
        choices = [Choice(model.tokenizer.detokenizer(), StopStrings(())) for _ in requests]
        sizes = [len(request.prompt) for request in requests]
        self.request_log.note_work(model.name, sum(sizes), choices)
        waves = split_waves(sizes, self._max_wave(), self._calls.engine.admission.max_tokens)
        self._grow_to(max(len(sizes[wave]) for wave in waves), max(sum(sizes[wave]) for wave in waves))
        for wave in waves:
            with ExitStack() as held:
                for _ in self._submit(requests[wave], choices[wave], model, held):
                    pass
        return choices

    def _submit(
        self,
        requests: Sequence[GenerationRequest],
        choices: Sequence[Choice],
        model: ServedModel,
        held: ExitStack,
    ) -> Deltas:
        self.request_log.submitted = self.request_log.submitted or time.monotonic()
        stream = self._calls.engine.submit(requests, model)
        held.callback(stream.close)
        self._watch(stream.close, held)
        deltas = Deltas(stream, choices, self.deadline)
        self.request_log.deltas.append(deltas)
        return deltas

    def _watch(self, on_gone: Callable[[], None], held: ExitStack) -> None:
        if self.client is not None:
            watcher = self._calls.watcher
            held.callback(watcher.unwatch, watcher.watch(self.client, on_gone))

    def _grow_to(self, num_requests: int, num_tokens: int, param: str | None = None) -> None:
        assert self._reservation is not None  # `read` or `reserve` comes first
        self._reservation.grow_to(num_requests, num_tokens, param)

    def _max_wave(self) -> int:
        max_inflight = self._calls.engine.max_inflight
        return min(self.settings.max_running or max_inflight, max_inflight)


def header_timeout() -> float | None:
    """The timeout in seconds from the client's header, if it sent one."""
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
