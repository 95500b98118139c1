"""The README is the front door: what it says about settings, endpoints and commands is what there is."""

from __future__ import annotations

import re
from pathlib import Path

from levserve.settings.settings import settings_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_settings_table_is_the_settings() -> None:
    shown = re.search(r"<!-- settings -->\n(.*?)\n<!-- /settings -->", README, re.DOTALL)
    assert shown is not None
    assert shown[1].strip() == settings_table().strip()


def test_every_endpoint_it_names_exists_and_every_endpoint_is_named() -> None:
    from levserve.engine.engine import Engine
    from levserve.models.registry import Registry
    from levserve.observe.metrics import Metrics
    from levserve.settings.parse import parse_settings
    from levserve.web.app import create_app
    from levserve.web.watcher import Watcher

    watcher = Watcher()
    try:
        app = create_app(Registry(Engine(max_inflight=1, metrics=Metrics())), parse_settings([], {}), watcher)
    finally:
        watcher.stop()
    routes = {re.sub(r"<.*?>", "{id}", rule.rule) for rule in app.url_map.iter_rules()} - {"/"}
    table = README.split("## Endpoints")[1].split("\n\n")[1]
    named = {path for row in table.splitlines() for path in re.findall(r"`(?:GET|POST) (/\S+)`", row)}
    also_under_v1 = {
        f"/v1{path}"
        for row in table.splitlines()
        if "also under `/v1`" in row
        for path in re.findall(r"T (/\S+)`", row)
    }
    assert named | also_under_v1 == routes


def test_ci_runs_the_readmes_test_command() -> None:
    assert "README.md" in (ROOT / ".ci" / "run").read_text()
    assert len(re.findall(r"pytest$", README, re.MULTILINE)) == 1
