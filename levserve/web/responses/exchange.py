"""One request to /v1/responses: its draft, its end, and how it is kept. Used on its HTTP thread."""

from __future__ import annotations

import time

import msgspec
from msgspec import structs

from levserve.errors import BadRequest
from levserve.schedule.request import FinishReason
from levserve.web.responses.body import ResponseBody
from levserve.web.responses.input_items import InputItem, read_input
from levserve.web.responses.objects import (
    IncompleteDetails,
    ResponseObject,
    Status,
    begin_response,
    count_usage,
    draft_response,
)
from levserve.web.responses.output import Output
from levserve.web.responses.store import ResponseStore
from levserve.web.run import Run

REASONS = {FinishReason.LENGTH: "max_output_tokens", FinishReason.DEADLINE: "deadline"}


class Exchange:
    """Raises `BadRequest` for an input that is wrong, or that continues a response that is not stored."""

    def __init__(self, body: ResponseBody, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        history = _find_history(body, store, owner)
        self._items = [*history, *read_input(body.input, history)]
        self.chat = body.to_chat(self._items)
        self.draft = draft_response(body, is_stored=body.is_stored and store.is_open)

    def begin(self, run: Run) -> ResponseObject:
        return begin_response(self.draft, run, self.chat.parallel_tool_calls)

    def end(self, begun: ResponseObject, output: Output, run: Run) -> ResponseObject:
        """Returns the response of an answer that has ended, and stores it if it is to be kept."""
        response = structs.replace(
            begun,
            status=output.status,
            completed_at=int(time.time()) if output.status is Status.COMPLETED else None,
            incomplete_details=_details(output.finish),
            output=output.items,
            usage=count_usage(run),
        )
        if response.store:
            items = [item.complete() for item in self._items]
            self._store.put(response.id, self._owner, items, msgspec.json.encode(response))
        return response


def _find_history(body: ResponseBody, store: ResponseStore, owner: str) -> list[InputItem]:
    previous_id = body.previous_response_id
    if previous_id is None:
        return []
    found = store.get(previous_id, owner)
    if found is None:
        raise BadRequest(
            f"There is no stored response with the id '{previous_id[:64]}'.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.history


def _details(finish: FinishReason | None) -> IncompleteDetails | None:
    reason = REASONS.get(finish) if finish is not None else None
    return None if reason is None else IncompleteDetails(reason)
