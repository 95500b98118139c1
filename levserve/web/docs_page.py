"""The description of the API: /openapi.json for programs, /docs for people. The views run on HTTP threads.

Both are the same for everyone who can reach the server and hold no secrets, so like the page at / they need
no key. `--ui false` turns the page off and puts the description behind the key.
"""

from __future__ import annotations

import functools

import msgspec
from flask import Blueprint, Response, current_app

from levserve.models.registry import Registry
from levserve.settings.settings import Settings
from levserve.web.openapi import list_routes, make_document
from levserve.web.page import DESCRIPTION_PATH, DOCS_PATH
from levserve.web.static_files import StaticFiles

PAGE = "docs.html"


def docs_routes(registry: Registry, settings: Settings) -> Blueprint:
    routes = Blueprint("docs", __name__)
    files = StaticFiles()

    @functools.cache  # the routes of an application do not change once it serves
    def encode(model_name: str) -> bytes:
        return msgspec.json.encode(make_document(list_routes(current_app.url_map), settings, model_name))

    @routes.get(DESCRIPTION_PATH)
    def show_description() -> Response:
        loaded = registry.loaded_names()
        return Response(encode(loaded[0] if loaded else ""), content_type="application/json")

    if settings.ui:

        @routes.get(DOCS_PATH)
        def show_page() -> Response:
            return files.respond(PAGE)

    return routes
