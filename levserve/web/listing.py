"""The page of a list that a query asks for, with the parameters of OpenAI's API. Called in views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from flask import request
from msgspec import Struct

from levserve.errors import BadRequest
from levserve.request.decode import read_integer, require_choice


class HasId(Protocol):
    @property
    def id(self) -> str | None: ...


T = TypeVar("T", bound=HasId)


class ItemList(Struct, Generic[T], frozen=True):
    """A page of items; a subclass names the kind of its items, for the description of the API."""

    data: Sequence[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


ListKind = TypeVar("ListKind", bound=ItemList[Any])


def take_page(
    kind: type[ListKind], items: Sequence[HasId], *, default_limit: int, max_limit: int
) -> ListKind:
    """A page of `items`, which come oldest first; as in OpenAI's API, the page is newest first by default."""
    order = request.args.get("order", "desc")
    require_choice(order, ("asc", "desc"), "order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    limit = read_integer(request.args.get("limit", str(default_limit)), "limit", 1, max_limit)
    after = request.args.get("after")
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item.id == after]
        if not places:
            raise BadRequest(f"There is no item with the id '{after[:64]}'.", param="after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    first_id, last_id = (page[0].id, page[-1].id) if page else (None, None)
    return kind(page, first_id, last_id, len(page) < len(ordered))
