"""The embeddings endpoint, /v1/embeddings. The view runs on HTTP threads."""

from __future__ import annotations

from flask import Blueprint, Response

from levserve.answers.embeddings import EmbeddingBody, prepare_embeddings
from levserve.web.call import Calls
from levserve.web.json_body import json_response


def embeddings_routes(calls: Calls) -> Blueprint:
    routes = Blueprint("embeddings", __name__)

    @routes.post("/v1/embeddings")
    def embed() -> Response:
        with calls.begin() as call:
            body = call.read(EmbeddingBody)
            model = call.get_model(body.model)
            truncation = call.truncation(body.truncate_prompt_tokens, model)
            work = prepare_embeddings(body, model, call.model_name, truncation, call.engine_id, call.deadline)
            choices = call.compute(work.requests, model)
        return json_response(work.answer(choices))

    return routes
