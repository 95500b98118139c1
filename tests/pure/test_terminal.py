"""The commands in the terminal: conversations, mistakes in one line, listing models and fetching them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from levserve import cli
from levserve.api.model import Model
from levserve.settings.settings import Settings
from levserve.terminal.chat import Conversation, talk
from levserve.terminal.commands import COMMANDS
from tests.conftest import GOLDEN
from tests.fake_app import serving
from tests.stores import web_store


@pytest.fixture
def model() -> Iterator[Model]:
    with serving() as app, Model(app.registry, Settings()) as model:
        yield model


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_conversation_remembers_what_was_said(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(model, {"temperature": 0, "max_tokens": 2}, "t20")
    type_in(monkeypatch, "t17\n\n  t18  \n")
    talk(conversation)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        *("user", "assistant") * 2,
    ]
    assert capsys.readouterr().out == "t10 t11\nt10 t11\n"


def test_commands_change_the_conversation(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(model, {"temperature": 0, "max_tokens": 1})
    type_in(monkeypatch, "t17\nt18\n/undo\n/help\n/quit\nt19\n")
    talk(conversation)
    assert [message["content"] for message in conversation.messages] == ["t17", "t10"]
    assert "Ctrl-D" in capsys.readouterr().out
    type_in(monkeypatch, "/system t30\nt17\n/new\n")
    talk(conversation)
    assert conversation.messages == [{"role": "system", "content": "t30"}]


def test_a_question_that_does_not_fit_is_told_and_forgotten(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(model, {"temperature": 0, "max_tokens": 1})
    type_in(monkeypatch, "t17 " * 100 + "\nt18\n")
    talk(conversation)
    assert "maximum context length" in capsys.readouterr().err
    assert [message["content"] for message in conversation.messages] == ["t18", "t10"]


@pytest.mark.parametrize(
    "words",
    [
        ["generate"],
        ["generate", "x", "--max-tokens", "many"],
        ["generate", "x", "--dtype", "int3"],
        ["generate", "x", "--port", "8000"],
        ["generate", "x", "--model", "/nowhere"],
        ["chat", "/nowhere"],
        ["chat", "--colour"],
        ["batch"],
        ["batch", "/nowhere/in.jsonl", "/tmp/out.jsonl"],
        ["batch", __file__, __file__],
        ["batch", __file__, f"{Path(__file__).parent}/./{Path(__file__).name}", "--overwrite"],
        ["batch", __file__, "/nowhere/out.jsonl"],
        ["batch", __file__, "http://127.0.0.1:1/out.jsonl"],
        ["batch", __file__, "/tmp/out.jsonl", "--window", "0"],
        ["models", "extra"],
        ["models", "--models-dir", "/nowhere"],
        ["fetch", "no model"],
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"levserve {words[0]}: error: ")
    assert told.err.count("\n") == 1


def test_a_mistyped_command_is_told_from_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chta"]) == 2
    err = capsys.readouterr().err
    assert "model 'chta' does not exist" in err and err.endswith("; did you mean levserve chat?\n")
    assert cli.main(["./nothing"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_the_servers_help_lists_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    assert f"levserve {command}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert f"levserve {command}" in capsys.readouterr().out


def test_models_lists_a_folder_and_what_was_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(GOLDEN / "llama")
    snapshot = tmp_path / "cache" / "hub" / "models--org--name" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"\0" * 2_000_000)
    folders = ["--cache-dir", str(tmp_path / "cache"), "--models-dir", str(tmp_path / "models")]
    assert cli.main(["models", *folders]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "smollm2-135m",
        "org/name@0123456789ab",
        str(tmp_path / "models" / "tiny"),
    ]
    assert "2 MB" in lines[1]


def test_fetching_what_is_here_prints_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch", str(GOLDEN / "llama")]) == 0
    assert capsys.readouterr().out.strip() == str(GOLDEN / "llama")


def test_fetching_from_a_store_downloads_and_prints_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDEN / "llama", tmp_path / "web" / "llama")
    with web_store(tmp_path / "web") as server:
        words = ["fetch", f"{server.address}/llama", "--cache-dir", str(tmp_path / "cache")]
        assert cli.main(words) == 0
        folder = Path(capsys.readouterr().out.strip())
    assert tmp_path / "cache" in folder.parents
    wanted = (GOLDEN / "llama" / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == wanted
    assert cli.main(["fetch", str(folder)]) == 0  # works without the store, which has stopped
