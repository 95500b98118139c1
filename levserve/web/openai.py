"""The OpenAI endpoints: read a request, hand it to the engine, answer whole or as a stream.

Views run on HTTP threads. A place in the engine is taken before anything else and given back on every way out: when the
view ends, or for a stream when its last byte is written or its client has gone.
"""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
from flask import Blueprint, Response, g, request
from msgspec import UNSET, UnsetType

from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.models.entry import ModelInfo, Status
from levserve.models.registry import Registry, model_not_found
from levserve.settings.settings import Settings
from levserve.web.admit import admit, asked_timeout
from levserve.web.answer import Answer, ChatAnswer, TextAnswer
from levserve.web.body import read_body
from levserve.web.json_body import decode
from levserve.web.logprobs import PromptLogprobs, prompt_logprobs
from levserve.web.request_log import RequestLog
from levserve.web.run import Run, Runs
from levserve.web.schema import ChatBody, CompletionBody
from levserve.web.stream import stream_response


class ModelEntry(msgspec.Struct, frozen=True):
    """OpenAI's, and vLLM's length, and how far the model is: loaded, loading with its progress, or loadable on first use."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "levserve"
    status: Status = Status.LOADED
    progress: str | UnsetType = UNSET
    error: str | UnsetType = UNSET


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
        return _json(
            msgspec.json.encode(ModelList([_entry(model) for model in list_models(self._runs.registry)]))
        )

    def show_model(self, model_id: str) -> Response:
        return _json(msgspec.json.encode(_entry(find_model(self._runs.registry, model_id))))

    def _respond(
        self, body_kind: type[ChatBody] | type[CompletionBody], answer_kind: type[Answer]
    ) -> Response:
        with ExitStack() as held:
            reservation = held.enter_context(admit(self._engine))
            body = decode(read_body(self._settings.max_body_bytes), body_kind)
            client = request.environ.get("gunicorn.socket")  # Flask's test client has none
            record: RequestLog = g.record
            deadline = self._runs.deadline(record.started, asked_timeout(), body.timeout)

            def begin(model: ServedModel) -> Run:
                return self._runs.start(
                    body, model, reservation, held, record=record, deadline=deadline, client=client
                )

            if not body.stream:
                model = self._runs.borrow(body.model, held, deadline, client)
                run = begin(model)
                deltas = run.collect()
                timings = run.record.timings() if body.timings else UNSET
                return _json(
                    answer_kind(model).whole(deltas, run.usage(), _prompt_logprobs(body, run, model), timings)
                )
            handle = held.enter_context(self._runs.registry.borrow(body.model))
            return stream_response(
                handle,
                begin,
                answer_kind,
                held,
                self._settings,
                deadline=deadline,
                with_usage=body.wants_usage,
                with_timings=body.timings is True,
            )


def _prompt_logprobs(body: ChatBody | CompletionBody, run: Run, model: ServedModel) -> list[PromptLogprobs]:
    """Each prompt's scores, which its first choice has; none if they were not asked for."""
    if body.prompt_logprobs is None:
        return []
    scored = zip(run.prompts, run.choices[:: body.num_sequences], strict=True)
    return [
        prompt_logprobs(prompt, choice.prompt_logprobs, body.prompt_logprobs, model.tokenizer)
        for prompt, choice in scored
    ]


def list_models(registry: Registry) -> list[ModelInfo]:
    """Every model that may be asked for; raises `Unavailable` until the first one is loaded."""
    registry.engine.require_loaded()
    registry.refresh()
    return registry.describe()


def find_model(registry: Registry, name: str) -> ModelInfo:
    models = list_models(registry)
    for model in models:
        if model.name == name:
            return model
    raise model_not_found(name, [model.name for model in models])


def _entry(model: ModelInfo) -> ModelEntry:
    served = model.resident.model if model.resident is not None else None
    return ModelEntry(
        model.name,
        served.created if served is not None else 0,
        served.max_seq_len if served is not None else None,
        status=model.status,
        progress=model.progress if model.status is not Status.LOADED and model.progress else UNSET,
        error=model.error or UNSET,
    )


def _json(body: bytes) -> Response:
    return Response(body, content_type="application/json")
