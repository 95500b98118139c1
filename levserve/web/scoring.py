"""The scoring endpoint, /loglikelihood. The view runs on HTTP threads."""

from __future__ import annotations

from flask import Blueprint, Response

from levserve.answers.scoring import ScoreBody, prepare_scores
from levserve.web.call import Calls
from levserve.web.json_body import json_response


def scoring_routes(calls: Calls) -> Blueprint:
    routes = Blueprint("scoring", __name__)

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
