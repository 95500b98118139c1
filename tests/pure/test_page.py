"""The root path: which clients get the page, without a key, and with which headers; others get JSON."""

from __future__ import annotations

import configparser
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from werkzeug.test import TestResponse

from levserve.web.static_files import FOLDER
from tests.documents import ROOT
from tests.fake_app import App, serving

KEY = "sk-test-0123456789"
BROWSERS = (
    "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8,application/signed-exchange;v=b3;q=0.7",
)
OTHERS = (
    None,
    "",
    "*/*",
    "application/json",
    "application/json, text/html",
    "text/html;q=0.5, application/json",
)
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(api_key=KEY) as app:
        yield app


def get(app: App, path: str, accept: str | None = BROWSERS[0], **headers: str) -> TestResponse:
    given = {} if accept is None else {"Accept": accept}
    return app.client.get(path, headers=given | headers)


@pytest.mark.parametrize("accept", BROWSERS)
def test_a_browser_gets_the_page_without_a_key(app: App, accept: str) -> None:
    reply = get(app, "/", accept)
    assert (reply.status_code, reply.content_type) == (200, "text/html; charset=utf-8")
    assert reply.text.startswith("<!doctype html>") and "Accept" in reply.headers["Vary"]


@pytest.mark.parametrize("accept", OTHERS)
def test_other_clients_get_json_and_need_the_key(app: App, accept: str | None) -> None:
    assert get(app, "/", accept).status_code == 401
    reply = get(app, "/", accept, Authorization=f"Bearer {KEY}")
    assert reply.json is not None and reply.json["name"] == "levserve"
    assert "Accept" in reply.headers["Vary"]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/tokenizer_info", "/nowhere", "/statics"])
def test_a_browser_gets_nothing_else_without_a_key(app: App, path: str) -> None:
    assert get(app, path).status_code == 401
    assert app.client.post("/", headers={"Accept": BROWSERS[0]}).status_code == 401
    assert app.client.post("/static/style.css").status_code == 401


@pytest.mark.parametrize("path", ["/", *(f"/static/{name}" for name in FILES)])
def test_the_page_and_its_files_may_talk_to_this_server_only(app: App, path: str) -> None:
    reply = get(app, path)
    assert reply.status_code == 200
    policy = dict(part.split(" ", 1) for part in reply.headers["Content-Security-Policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Referrer-Policy"] == "no-referrer"


def test_a_browser_asks_whether_a_file_has_changed_and_fetches_it_once(app: App) -> None:
    first = get(app, "/static/style.css")
    assert first.headers["Cache-Control"] == "no-cache"
    again = get(app, "/static/style.css", **{"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")
    assert again.headers["ETag"] == first.headers["ETag"]
    assert get(app, "/static/style.css", **{"If-None-Match": '"other"'}).data == first.data


@pytest.mark.parametrize(
    "name", ["nothing.js", "../page.py", "..%2fpage.py", "%2e%2e/page.py", "./style.css/", "/etc/passwd"]
)
def test_only_the_pages_files_are_served(app: App, name: str) -> None:
    reply = get(app, f"/static/{name}", Authorization=f"Bearer {KEY}")
    assert reply.status_code == 404
    assert reply.json is not None and reply.json["error"]["type"] == "invalid_request_error"


def test_without_the_page_a_browser_gets_what_others_get() -> None:
    with serving(ui=False) as app:
        assert get(app, "/").json == get(app, "/", None).json
        assert get(app, "/static/style.css").status_code == 404
    with serving(ui=False, api_key=KEY) as app:
        assert {get(app, path).status_code for path in ("/", "/static/style.css")} == {401}


def test_an_installed_package_has_every_file() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = [pattern.strip() for pattern in config["options.package_data"]["levserve"].split(",")]
    for name in FILES:
        assert any(PurePosixPath("web/static", name).match(pattern) for pattern in patterns), name


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for name in FILES:
        text = (FOLDER / name).read_text()
        for scheme in ("http://", "https://", "//cdn"):
            for line in text.splitlines():
                assert scheme not in line or "www.w3.org/2000/svg" in line, f"{name}: {line}"
