"""The settings file in YAML: the same sections and keys as in ini, and mistakes reported with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from levserve.settings.parse import parse_settings
from tests.pure.test_config import refuse

EXAMPLE = """\
server:
  host: ::1
  port: 7001            # not 8000
  api-key: '0123'
  open-metrics: yes
  cors-origins: [https://a.example, https://b.example]
engine:
  max-batch-size: 8
  kv-memory: 1GiB
  seed:
limits: {request-timeout: 0.5}
log:
model.one:
  model: /srv/one
model.org/two:
"""


def serve_yaml(folder: Path, text: str, name: str = "serve.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", ["serve.yaml", "serve.yml", "SERVE.YAML"])
def test_a_yaml_file_has_the_sections_of_the_ini_file(tmp_path: Path, name: str) -> None:
    path = serve_yaml(tmp_path, EXAMPLE, name)
    settings = parse_settings(["--config", path], {"LEVSERVE_PORT": "7002"})
    assert (settings.host, settings.port, settings.api_key, settings.open_metrics) == (
        "::1",
        7002,
        "0123",
        True,
    )
    assert settings.cors_origins == ("https://a.example", "https://b.example")
    assert (settings.max_running, settings.kv_memory, settings.seed) == (8, 2**30, None)
    assert settings.request_timeout == 0.5
    assert settings.models["one"].model == "/srv/one" and settings.models["org/two"].model == "org/two"
    assert settings.sources["host"] == f"file {path}"


@pytest.mark.parametrize("text", ["", "# nothing\n", "server:\n", "~\n"])
def test_an_empty_file_or_section_sets_nothing(tmp_path: Path, text: str) -> None:
    assert parse_settings(["--config", serve_yaml(tmp_path, text)], {}).sources == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sever:\n  port: 1\n", ["unknown section [sever]", "server"]),
        ("server:\n  prot: 1\n", ["[server] prot", "did you mean port?"]),
        ("engine:\n  port: 1\n", ["[engine] port", "belongs in [server]"]),
        ("server:\n  port: http\n", ["--port must be", "'http'", "[server] port"]),
        ("server:\n  port: 1\n  port: 2\n", ["line 3", "port", "twice"]),
        ("server:\n  port: 1\nserver:\n  host: a\n", ["line 4", "server", "twice"]),
        ("port: 1\n", ["line 1", "keys of section port"]),
        ("- port\n", ["line 1", "sections"]),
        ("server:\n  port: {a: 1}\n", ["[server] port", "expected a value"]),
        ("server:\n  ? [a]\n  : 1\n", ["line 2"]),
        ("server: [\n", ["line 2"]),
        ("server:\n\tport: 1\n", ["line 2"]),
        ("a: 1\n---\nb: 1\n", ["line 2"]),
        ("server: *other\n", ["line 1", "quotes"]),
        ("server: \x01\n", ["serve.yaml"]),
    ],
)  # fmt: skip
def test_a_mistake_in_the_yaml_file_is_named_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: list[str]
) -> None:
    path = serve_yaml(tmp_path, text)
    line = refuse(capsys, ["--config", path])
    assert all(word in line for word in [path, *named])


@pytest.mark.parametrize(
    "value", ["*SECRET", "&SECRET", "!SECRET", "!!SECRET", "!a!SECRET", "*", "&", "*!SECRET"]
)
def test_a_value_that_yaml_takes_for_a_mark_is_refused_and_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    """A key that begins with & or ! would be an empty one: the server would accept anyone."""
    line = refuse(capsys, ["--config", serve_yaml(tmp_path, f"server:\n  api-key: {value}\n")])
    assert "line 2: " in line and "in quotes" in line and "SECRET" not in line


@pytest.mark.parametrize("value", ["'*SECRET'", '"&SECRET"'])
def test_a_quoted_value_may_begin_with_a_mark(tmp_path: Path, value: str) -> None:
    path = serve_yaml(tmp_path, f"server:\n  api-key: {value}\n")
    assert parse_settings(["--config", path], {}).api_key == value[1:-1]
