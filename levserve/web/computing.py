"""The endpoints that run a model on texts but generate nothing: /v1/embeddings and /loglikelihood.

The views run on HTTP threads.
"""

from __future__ import annotations

from flask import Blueprint, Response

from levserve.answers.embeddings import EmbeddingBody, prepare_embeddings
from levserve.answers.scoring import ScoreBody, prepare_scores
from levserve.web.call import Calls
from levserve.web.json_body import json_response


def computing_routes(calls: Calls) -> Blueprint:
    routes = Blueprint("computing", __name__)

    @routes.post("/v1/embeddings")
    def embed() -> Response:
        with calls.begin() as call:
            body = call.read(EmbeddingBody)
            model = call.get_model(body.model)
            truncation = call.truncation(body.truncate_prompt_tokens, model)
            work = prepare_embeddings(body, model, call.model_name, truncation, call.engine_id, call.deadline)
            choices = call.compute(work.requests, model)
        return json_response(work.answer(choices))

    @routes.post("/loglikelihood")
    def score() -> Response:
        with calls.begin() as call:
            body = call.read(ScoreBody)
            model = call.get_model(body.model)
            truncation = call.truncation(body.truncate_prompt_tokens, model)
            work = prepare_scores(body, model, truncation, call.engine_id, call.deadline)
            choices = call.compute(work.requests, model)
        return json_response(work.answer(choices))

    return routes
