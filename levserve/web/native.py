"""The plain endpoints for scripts: /generate takes a list of prompts and gives a list of texts, /generate_stream the pieces.

Both are completions underneath, with names and defaults of their own. Views run on HTTP threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Annotated

import msgspec
from flask import Blueprint, Response, g, request
from msgspec import UNSET, Meta, Struct, UnsetType

from levserve.engine.admission import Reservation
from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest
from levserve.schedule.request import FinishReason
from levserve.settings.settings import Settings
from levserve.web.admit import admit, asked_timeout
from levserve.web.answer import ChatPiece, TextAnswer, TextChoice, Timings, Usage
from levserve.web.body import read_body
from levserve.web.json_body import decode
from levserve.web.request_log import RequestLog
from levserve.web.run import Run, Runs
from levserve.web.schema import MAX_STOPS, CompletionBody, Count, Seconds, StopString
from levserve.web.stream import stream_response

# What a completion calls the fields of ours that its errors name.
NAMES = {"prompt": "prompts", "n": "prompts"}


class GenerateBody(Struct, frozen=True, kw_only=True):
    """The body of both endpoints. Any field but `prompts` may be null, which is the same as leaving it out."""

    prompts: Annotated[list[str], Meta(min_length=1)]
    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    timeout: Seconds | None = None

    def to_completion(self, model_name: str) -> CompletionBody:
        return CompletionBody(
            model=model_name,
            prompt=list(self.prompts),
            max_tokens=128 if self.max_tokens is None else self.max_tokens,
            temperature=0.7 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop=self.stop,
        )


class Generated(Struct, frozen=True):
    """One text and one reason for its end a prompt, in their order."""

    completions: list[str]
    finish_reasons: list[FinishReason | None]
    usage: Usage


class Piece(Struct, frozen=True):
    index: int
    text: str
    finish_reason: FinishReason | UnsetType = UNSET


class PieceAnswer(TextAnswer):
    """The events of /generate_stream."""

    def chunk(
        self,
        choices: Sequence[TextChoice | ChatPiece],
        usage: Usage | UnsetType | None,
        timings: Timings | UnsetType = UNSET,
    ) -> bytes:
        (choice,) = choices
        assert isinstance(choice, TextChoice)
        return msgspec.json.encode(Piece(choice.index, choice.text, choice.finish_reason or UNSET))


class Native:
    """The views; shared by all HTTP threads and without state of any one request."""

    def __init__(self, engine: Engine, settings: Settings, runs: Runs) -> None:
        self._engine = engine
        self._settings = settings
        self._runs = runs

    def routes(self) -> Blueprint:
        routes = Blueprint("native", __name__)
        routes.add_url_rule("/generate", view_func=self.generate, methods=["POST"])
        routes.add_url_rule("/generate_stream", view_func=self.generate_stream, methods=["POST"])
        return routes

    def generate(self) -> Response:
        with ExitStack() as held:
            body, reservation = self._read(held, stream=False)
            deadline = self._deadline(body)
            model = self._runs.borrow(body.model, held, deadline, request.environ.get("gunicorn.socket"))
            run = self._beginner(body, reservation, held, deadline)(model)
            deltas = run.collect()
            answer = Generated(
                [delta.text for delta in deltas], [delta.finish for delta in deltas], run.usage()
            )
            return Response(msgspec.json.encode(answer), content_type="application/json")

    def generate_stream(self) -> Response:
        with ExitStack() as held:
            body, reservation = self._read(held, stream=True)
            deadline = self._deadline(body)
            handle = held.enter_context(self._runs.registry.borrow(body.model))
            begin = self._beginner(body, reservation, held, deadline)
            return stream_response(handle, begin, PieceAnswer, held, self._settings, deadline=deadline)

    def _deadline(self, body: GenerateBody) -> float | None:
        return self._runs.deadline(g.record.started, asked_timeout(), body.timeout)

    def _read(self, held: ExitStack, *, stream: bool) -> tuple[GenerateBody, Reservation]:
        reservation = held.enter_context(admit(self._engine))
        body = decode(read_body(self._settings.max_body_bytes), GenerateBody)
        if body.stream not in (None, stream):
            words = "always streams; ask /generate" if stream else "never streams; ask /generate_stream"
            raise BadRequest(f"This path {words} instead.", param="stream")
        return body, reservation

    def _beginner(
        self, body: GenerateBody, reservation: Reservation, held: ExitStack, deadline: float | None
    ) -> Callable[[ServedModel], Run]:
        client = request.environ.get("gunicorn.socket")  # Flask's test client has none
        record: RequestLog = g.record

        def begin(model: ServedModel) -> Run:
            completion = body.to_completion(model.name)
            try:
                return self._runs.start(
                    completion, model, reservation, held, record=record, deadline=deadline, client=client
                )
            except BadRequest as error:
                error.param = NAMES.get(error.param or "", error.param)
                raise

        return begin
