"""The environment file, and the variables that Kubernetes sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from levserve.settings.parse import parse_settings
from tests.pure.test_config import refuse

SEED = """\
# Required
GCS_BUCKET=your-models-bucket
GCS_MODEL_PREFIX=models/

LOCAL_MODEL_CACHE=/tmp/model_cache
MAX_CACHED_MODELS=2
DEFAULT_TEMPERATURE=0.7   # for chats

# For local development
LOCAL_DEV=true
PORT=8080
"""


def env_file(folder: Path, text: str, name: str = ".env") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_in_the_working_folder_is_read_and_told(folder: Path) -> None:
    env_file(folder, SEED)
    settings = parse_settings([], {})
    assert (settings.port, settings.models_dir, settings.default_temperature, settings.max_running) == (
        8080,
        "gs://your-models-bucket/models",
        0.7,
        1,
    )
    assert settings.notes[0] == "read 7 variables from .env"
    assert settings.sources["port"] == "environment PORT from .env"


def test_the_real_environment_wins_over_the_file(folder: Path) -> None:
    env_file(folder, "PORT=8080\nMAX_CACHED_MODELS=2\n")
    settings = parse_settings([], {"PORT": "9090"})
    assert (settings.port, settings.max_loaded_models) == (9090, 2)
    assert settings.sources["port"] == "environment PORT"
    assert settings.notes[0] == (
        "read 1 variable from .env; 1 more in it are set in the environment, which wins"
    )


def test_another_file_can_be_named_and_is_read_instead(folder: Path) -> None:
    env_file(folder, "PORT=8080\n")
    path = env_file(folder, "LEVSERVE_MAX_RUNNING=4\n", "prod.env")
    settings = parse_settings(["--env-file", str(path)], {})
    assert (settings.max_running, settings.port) == (4, 8000)
    assert settings.sources["max_running"] == f"environment LEVSERVE_MAX_RUNNING from {path}"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=b", "b"),
        ("export A=b", "b"),
        ("  A = b  ", "b"),
        ("A=b # comment", "b"),
        ("A=b#c", "b#c"),
        ("A=#c", "#c"),
        ("A= # comment", ""),
        ("A=", ""),
        ("A='b # c'", "b # c"),
        ('A="b # c" # d', "b # c"),
        (r"A='b\n'", r"b\n"),
        (r'A="b\n\"c\""', 'b\n"c"'),
        ('A="b\nc"', "b\nc"),
        ("A=b=c", "b=c"),
        ("A=it's", "it's"),
    ],
)
def test_a_line_of_the_file_is_read_as_a_shell_would(folder: Path, line: str, value: str) -> None:
    entry = line.replace("A", "LEVSERVE_REVISION", 1)
    env_file(folder, f"FIRST=1\n{entry}\n\n# end\nLEVSERVE_API_KEY=last")
    settings = parse_settings([], {})
    assert (settings.revision, settings.api_key) == (value, "last")


def test_libraries_see_the_variables_of_the_file(folder: Path) -> None:
    env_file(folder, "HF_TOKEN=from-file\nHOME=/nowhere\n")
    program = "from levserve.settings.parse import parse_settings; parse_settings([]); import os; print(os.environ['HF_TOKEN'], os.environ['HOME'])"
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("LEVSERVE_", "HF_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"from-file {os.environ['HOME']}\n", done.stderr


def test_a_name_alone_sets_nothing(folder: Path) -> None:
    env_file(folder, "HOME\nPORT\nLEVSERVE_PORT=7001\n")
    assert parse_settings([], {}).port == 7001


@pytest.mark.parametrize("line", ["hunter2 again", "=x", "A='b", 'A="b" c', "1A=b"])
def test_a_line_that_is_no_entry_is_named_by_its_number_and_not_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    env_file(folder, f"# first\n\n{line}\n")
    told = refuse(capsys, [])
    assert "--env-file .env, line 3: expected NAME=value" in told and "hunter2" not in told


def test_a_file_that_is_named_and_missing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--env-file: cannot read 'prod.env': No such file or directory" in refuse(
        capsys, ["--env-file", "prod.env"]
    )
    assert "--env-file" in refuse(capsys, ["--env-file"])


def test_a_folder_named_env_is_not_the_file(folder: Path) -> None:
    (folder / ".env").mkdir()  # as a virtual environment may be named
    assert parse_settings([], {}).notes == ()


def test_a_typo_in_the_file_is_refused_with_the_files_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env_file(folder, "LEVSERVE_PROT=1\n")
    told = refuse(capsys, [])
    assert "LEVSERVE_PROT" in told and "(.env)" in told
    env_file(folder, "LEVSERVE_PORT=http\n")
    assert "(environment LEVSERVE_PORT from .env)" in refuse(capsys, [])


KUBERNETES = {
    "LEVSERVE_SERVICE_HOST": "10.0.0.11",
    "LEVSERVE_SERVICE_PORT": "8000",
    "LEVSERVE_SERVICE_PORT_HTTP": "8000",
    "LEVSERVE_PORT": "tcp://10.0.0.11:8000",
    "LEVSERVE_PORT_8000_TCP": "tcp://10.0.0.11:8000",
    "LEVSERVE_PORT_8000_TCP_ADDR": "10.0.0.11",
    "LEVSERVE_PORT_8000_TCP_PORT": "8000",
    "LEVSERVE_PORT_8000_TCP_PROTO": "tcp",
    "LEVSERVE_API_SERVICE_HOST": "10.0.0.12",
    "LEVSERVE_API_PORT": "tcp://10.0.0.12:80",
    "LEVSERVE_API_PORT_80_TCP": "tcp://10.0.0.12:80",
}


def test_what_kubernetes_sets_for_a_service_named_levserve_is_ignored_and_told() -> None:
    settings = parse_settings([], {**KUBERNETES, "LEVSERVE_MAX_RUNNING": "4"})
    assert (settings.port, settings.max_running) == (8000, 4)
    (note,) = settings.notes
    assert "Kubernetes" in note and all(name in note for name in KUBERNETES)


@pytest.mark.parametrize("variable", ["LEVSERVE_PORT", "LEVSERVE_HOST_SERVICE", "LEVSERVE_PORT_TCP"])
def test_what_kubernetes_does_not_set_is_still_refused(
    capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    assert variable in refuse(capsys, [], {variable: "http"})


@pytest.mark.parametrize("question", ["--help", "--version"])
def test_help_comes_even_where_the_file_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], question: str
) -> None:
    env_file(folder, "not an entry\n")
    with pytest.raises(SystemExit) as stopped:
        parse_settings([question], {})
    assert stopped.value.code == 0 and "levserve" in capsys.readouterr().out
