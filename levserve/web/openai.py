"""OpenAI's generating endpoints, /v1/completions and /v1/chat/completions. The views run on HTTP threads."""

from __future__ import annotations

from flask import Blueprint, Response

from levserve.answers.answer import Answer, ChatAnswer, TextAnswer
from levserve.request.schema import ChatBody, CompletionBody
from levserve.web.call import Calls
from levserve.web.events import ChunkStream
from levserve.web.json_body import json_response
from levserve.web.sse import stream_response


def openai_routes(calls: Calls) -> Blueprint:
    routes = Blueprint("openai", __name__)

    @routes.post("/v1/completions")
    def complete() -> Response:
        return respond(CompletionBody, TextAnswer)

    @routes.post("/v1/chat/completions")
    def chat() -> Response:
        return respond(ChatBody, ChatAnswer)

    def respond(body_kind: type[ChatBody] | type[CompletionBody], answer_kind: type[Answer]) -> Response:
        with calls.begin() as call:
            body = call.read(body_kind)
            if body.stream:
                return stream_response(call, body, ChunkStream(answer_kind))
            run = call.start(body, call.get_model(body.model))
            deltas = run.collect()
            answer = run.make_answer(answer_kind)
            return json_response(answer.whole(deltas, run.usage(), run.prompt_logprobs(), run.timings()))

    return routes
