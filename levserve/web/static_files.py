"""Serves the files of the pages for browsers, from `static/` beside this module. Runs on HTTP threads.

The files are the same in every installation and hold no secrets, so no key guards them: a browser cannot send
one when it opens an address. What a page shows comes from the API, which asks for the key.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flask import Blueprint, Response, request

from levserve.errors import NotFound

FOLDER = Path(__file__).parent / "static"
STATIC_PATHS = "/static/"
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# A page runs scripts and loads styles from these files only, and talks to this server only: text of a model
# that got into the page as markup could neither run nor send anything elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The browser keeps the files and asks each time whether they have changed: after an upgrade, scripts of
    # two versions would not fit together.
    "Cache-Control": "no-cache",
}


class StaticFile(NamedTuple):
    content: bytes
    content_type: str


class StaticFiles:
    """Every file in the folder by its path there, read once; shared by all HTTP threads."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files: dict[str, StaticFile] = {}
        for path in folder.rglob("*"):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                self._files[name] = StaticFile(path.read_bytes(), CONTENT_TYPES[path.suffix])

    def respond(self, name: str) -> Response:
        """The file, or 304 if the browser has it already; raises `NotFound`."""
        file = self._files.get(name)
        if file is None:
            raise NotFound(f"There is no file {STATIC_PATHS}{name[:64]}.")
        response = Response(file.content, headers=HEADERS, content_type=file.content_type)
        response.add_etag()
        response.make_conditional(request)
        return response


def static_routes(files: StaticFiles) -> Blueprint:
    routes = Blueprint("static_files", __name__)

    @routes.get(f"{STATIC_PATHS}<path:name>")
    def show_file(name: str) -> Response:
        return files.respond(name)

    return routes
