"""Anthropic's /v1/messages and /v1/messages/count_tokens. The views run on HTTP threads."""

from __future__ import annotations

from flask import Blueprint, Response

from levserve.request.submission import tokenize
from levserve.web.call import Calls
from levserve.web.json_body import json_response
from levserve.web.messages.answer import MessageAnswer
from levserve.web.messages.body import MessageBody, PromptBody
from levserve.web.messages.chat import MESSAGE_NAMES, make_chat, make_prompt
from levserve.web.messages.errors import PATH
from levserve.web.messages.events import MessageStream
from levserve.web.messages.objects import TokenCount
from levserve.web.sse import stream_response


def messages_routes(calls: Calls) -> Blueprint:
    routes = Blueprint("messages", __name__)

    @routes.post(PATH)
    def create_message() -> Response:
        with calls.begin() as call:
            body = call.read(MessageBody)
            with MESSAGE_NAMES.in_errors():
                chat = make_chat(body)
                if body.stream:
                    kind = MessageStream(call.request_log.request_id, hides_thoughts=body.hides_thoughts)
                    return stream_response(call, chat, kind)
                run = call.start(chat, call.get_model(body.model))
                (delta,) = run.collect()
                return json_response(MessageAnswer(run, hides_thoughts=body.hides_thoughts).whole(delta))

    @routes.post(f"{PATH}/count_tokens")
    def count_tokens() -> Response:
        with calls.begin() as call:
            body = call.read(PromptBody)
            with MESSAGE_NAMES.in_errors():
                (tokens,) = tokenize(make_prompt(body), call.get_model(body.model), checks_length=False)
            return json_response(TokenCount(len(tokens)))

    return routes
