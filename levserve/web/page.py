"""The front door, GET /: a page for browsers, and for other clients the list of endpoints as JSON.

The views run on HTTP threads. `static/index.html` is the page; it calls the API as any other client does.
"""

from __future__ import annotations

from flask import Blueprint, Response, current_app, request
from msgspec import Struct

from levserve import __version__
from levserve.web.json_body import json_response
from levserve.web.static_files import STATIC_PATHS, StaticFiles, static_routes

FRONT = "/"
DOCS_PATH = "/docs"
DESCRIPTION_PATH = "/openapi.json"
OPEN_PAGES = (DOCS_PATH, DESCRIPTION_PATH)
"""Open without a key like the front page; see `docs_page.py`."""
PAGE = "index.html"


class FrontPage(Struct, frozen=True):
    name: str
    version: str
    endpoints: list[str]


def page_routes(*, has_ui: bool) -> Blueprint:
    """Without `has_ui`, every client gets JSON, and there are no static files."""
    routes = Blueprint("page", __name__)
    files = StaticFiles()
    if has_ui:
        routes.register_blueprint(static_routes(files))

    @routes.get(FRONT)
    def show_front() -> Response:
        is_page = has_ui and prefers_html()
        response = files.respond(PAGE) if is_page else _show_endpoints()
        response.vary.add("Accept")
        return response

    return routes


def is_for_page() -> bool:
    """Whether the request is for the page itself or one of its files: these are open without a key."""
    if request.method not in ("GET", "HEAD"):
        return False
    if request.path == FRONT:
        return prefers_html()
    return request.path.startswith(STATIC_PATHS) or request.path in OPEN_PAGES


def prefers_html() -> bool:
    """Browsers name text/html before anything else; curl and HTTP libraries accept all types alike."""
    accepted = request.accept_mimetypes
    return accepted["text/html"] > accepted["application/json"]


def _show_endpoints() -> Response:
    endpoints = sorted({rule.rule for rule in current_app.url_map.iter_rules()})
    return json_response(FrontPage("levserve", __version__, endpoints))
