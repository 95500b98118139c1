"""The OpenAI endpoints: read a request, hand it to the engine, answer whole or as a stream.

Views run on HTTP threads. A place in the engine is taken before anything else and given back on every way out: when the
view ends, or for a stream when its last byte is written or its client has gone.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
from flask import Blueprint, Response, g, request
from werkzeug.exceptions import UnsupportedMediaType

from levserve.config import Settings
from levserve.engine.engine import Engine, ServedModel
from levserve.errors import BodyTooLarge, ServeError
from levserve.generation import ClientGone, Delta
from levserve.web import sse
from levserve.web.answer import Answer, ChatAnswer, TextAnswer
from levserve.web.decode import decode
from levserve.web.run import Run, Runs
from levserve.web.schema import ChatBody, CompletionBody
from levserve.web.submission import check_model_name

log = logging.getLogger(__name__)


class ModelEntry(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "levserve"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelEntry]
    object: str = "list"


class OpenAI:
    """The views of the OpenAI endpoints; shared by all HTTP threads and without state of any one request."""

    def __init__(self, engine: Engine, settings: Settings, runs: Runs) -> None:
        self._engine = engine
        self._settings = settings
        self._runs = runs

    def routes(self) -> Blueprint:
        routes = Blueprint("openai", __name__)
        routes.add_url_rule("/v1/completions", view_func=self.complete, methods=["POST"])
        routes.add_url_rule("/v1/chat/completions", view_func=self.chat, methods=["POST"])
        routes.add_url_rule("/v1/models", view_func=self.list_models)
        routes.add_url_rule("/v1/models/<path:model_id>", view_func=self.show_model)
        return routes

    def complete(self) -> Response:
        return self._respond(CompletionBody, TextAnswer)

    def chat(self) -> Response:
        return self._respond(ChatBody, ChatAnswer)

    def list_models(self) -> Response:
        return _json(msgspec.json.encode(ModelList([_entry(self._engine.model)])))

    def show_model(self, model_id: str) -> Response:
        check_model_name(model_id, self._engine.model)
        return _json(msgspec.json.encode(_entry(self._engine.model)))

    def _respond(self, body_kind: type[ChatBody] | type[CompletionBody], answer_kind: type[Answer]) -> Response:
        started = time.monotonic()
        with ExitStack() as held:
            reservation = held.enter_context(self._engine.reserve())
            body = decode(_read_body(self._settings.max_body_bytes), body_kind)
            model = self._engine.model
            client = request.environ.get("gunicorn.socket")  # Flask's test client has none
            run = self._runs.start(body, model, reservation, held, request_id=g.request_id, started=started, client=client)
            answer = answer_kind(model)
            if body.stream:
                events = sse.Events(answer, len(run.choices), with_usage=body.wants_usage)
                first = next(run.deltas)  # one that fails before its first token gets a real status
                response = Response(_stream(run, first, events, body.wants_usage, g.request_id), headers=sse.HEADERS)
                response.call_on_close(held.pop_all().close)  # a generator that was never started runs no `finally`
                return response
            response = _json(answer.whole(run.collect(), run.usage()))
            response.headers["openai-processing-ms"] = str(round((time.monotonic() - started) * 1000))
            return response


def _read_body(max_bytes: int) -> bytes:
    if request.mimetype not in ("", "application/json"):  # a browser asks before it sends this type to another site
        raise UnsupportedMediaType("Send the body as application/json.")
    too_large = BodyTooLarge(f"The body is larger than this server's limit of {max_bytes} bytes.")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    data = request.stream.read(max_bytes + 1)  # without a Content-Length, one byte more tells that it is too large
    if len(data) > max_bytes:
        raise too_large
    return data


def _stream(run: Run, first: tuple[int, Delta], events: sse.Events, with_usage: bool, request_id: str) -> Iterator[bytes]:
    """The body of a stream. Whatever happens after the 200 is told in it, and it always ends with [DONE]."""
    try:
        pending = events.opening()
        for index, delta in itertools.chain((first,), run.deltas):
            pending += events.delta(index, delta)
            if pending:
                yield pending
                pending = b""
        if with_usage:
            yield events.usage(run.usage())
    except ClientGone:
        return
    except ServeError as error:
        yield sse.error_event(error)
    except Exception:  # the 500 handler's part, where it is too late for a 500
        log.exception("%s failed while streaming", request_id)
        yield sse.error_event(ServeError("The server failed while it was answering."))
    yield sse.DONE


def _entry(model: ServedModel) -> ModelEntry:
    return ModelEntry(model.name, model.created, model.max_seq_len)


def _json(body: bytes) -> Response:
    return Response(body, content_type="application/json")
