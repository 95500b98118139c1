"""OpenAI's /v1/responses: create, read and delete. The views run on HTTP threads."""

from __future__ import annotations

from flask import Blueprint, Response, request
from msgspec import Struct

from levserve.errors import BadRequest, NotFound
from levserve.generation import Delta
from levserve.request.submission import tokenize
from levserve.web.auth import key_owner
from levserve.web.call import Call, Calls
from levserve.web.json_body import json_response
from levserve.web.listing import ItemList, take_page
from levserve.web.responses.body import RESPONSE_NAMES, ResponseBody
from levserve.web.responses.events import ResponseStream
from levserve.web.responses.exchange import Exchange
from levserve.web.responses.input_items import InputItem
from levserve.web.responses.objects import ResponseObject
from levserve.web.responses.output import Output
from levserve.web.responses.store import ResponseStore, StoredResponse
from levserve.web.sse import stream_response

MAX_LISTED = 100
DEFAULT_LISTED = 20


class DeletedResponse(Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class InputTokenCount(Struct, frozen=True):
    input_tokens: int
    object: str = "response.input_tokens"


class InputItemList(ItemList[InputItem], frozen=True):
    pass


def responses_routes(calls: Calls, store: ResponseStore) -> Blueprint:
    routes = Blueprint("responses", __name__)

    @routes.post("/v1/responses")
    def create_response() -> Response:
        with calls.begin() as call:
            body = call.read(ResponseBody)
            exchange = Exchange(body, store, key_owner())
            with RESPONSE_NAMES.in_errors():
                if body.stream:
                    return stream_response(call, exchange.chat, ResponseStream(exchange))
                return json_response(_run_whole(call, exchange))

    @routes.get("/v1/responses/<response_id>")
    def read_response(response_id: str) -> Response:
        if request.args.get("stream", "false") != "false":
            raise BadRequest("A stored response cannot be streamed.", param="stream")
        return json_response(find(response_id).response)

    @routes.delete("/v1/responses/<response_id>")
    def delete_response(response_id: str) -> Response:
        if not store.delete(response_id, key_owner()):
            raise _not_found(response_id)
        return json_response(DeletedResponse(response_id))

    @routes.get("/v1/responses/<response_id>/input_items")
    def list_input_items(response_id: str) -> Response:
        items = [item.listed() for item in find(response_id).items]
        page = take_page(InputItemList, items, default_limit=DEFAULT_LISTED, max_limit=MAX_LISTED)
        return json_response(page)

    @routes.post("/v1/responses/<response_id>/cancel")
    def cancel_response(response_id: str) -> Response:
        find(response_id)
        raise BadRequest("Only a response in the background can be cancelled.", param="response_id")

    @routes.post("/v1/responses/input_tokens")
    def count_input_tokens() -> Response:
        with calls.begin() as call:
            exchange = Exchange(call.read(ResponseBody), store, key_owner())
            with RESPONSE_NAMES.in_errors():
                (tokens,) = tokenize(exchange.chat, call.get_model(exchange.chat.model), checks_length=False)
            return json_response(InputTokenCount(len(tokens)))

    def find(response_id: str) -> StoredResponse:
        found = store.get(response_id, key_owner())
        if found is None:
            raise _not_found(response_id)
        return found

    return routes


def _run_whole(call: Call, exchange: Exchange) -> ResponseObject:
    run = call.start(exchange.chat, call.get_model(exchange.chat.model))
    begun = exchange.begin(run)
    output = Output(run.choices[0], run.model.tokenizer)

    def take(index: int, delta: Delta) -> None:
        for _ in output.add(delta):  # the events are for streams
            pass

    run.each_delta(take)
    for _ in output.close():
        pass
    return exchange.end(begun, output, run)


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"There is no stored response with the id '{response_id[:64]}'.", param="response_id")
