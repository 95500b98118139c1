"""The commands in the terminal: conversations, mistakes in one line, listing models and fetching them."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from levserve import cli
from levserve.api.model import Model
from levserve.batch.tally import Tally
from levserve.errors import ServeError
from levserve.settings.settings import Settings
from levserve.terminal.batch import Reports
from levserve.terminal.chat import Conversation, talk
from levserve.terminal.commands import COMMANDS
from levserve.terminal.options import closing_unless_interrupted, show_loading
from levserve.terminal.streams import as_utf8, prepare_streams
from tests.conftest import GOLDEN
from tests.fake_app import serving
from tests.fake_device import QuietThinkingParrot
from tests.stores import web_store
from tests.waiting import COMPILE_SECONDS


@pytest.fixture
def model() -> Iterator[Model]:
    with serving() as app, Model(app.registry, Settings()) as model:
        yield model


@pytest.fixture
def thinker() -> Iterator[Model]:
    with serving(make_device=QuietThinkingParrot) as app, Model(app.registry, Settings()) as model:
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
    told = capsys.readouterr().err
    assert "maximum context length" in told and "/new" not in told  # there was nothing to forget
    assert [message["content"] for message in conversation.messages] == ["t18", "t10"]


def test_a_full_context_is_told_with_what_makes_room(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(model, {"temperature": 0, "max_tokens": 20})
    type_in(monkeypatch, "t17 " * 30 + "\n" + "t18 " * 30 + "\n")
    talk(conversation)
    told = capsys.readouterr().err
    assert "maximum context length" in told and "/undo or /new makes room" in told
    assert len(conversation.messages) == 2


def test_undo_leaves_the_system_prompt_and_says_when_there_is_nothing_to_take_back(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(model, {"temperature": 0, "max_tokens": 1}, "t20")
    type_in(monkeypatch, "t17\n/undo\n/undo\n")
    talk(conversation)
    assert conversation.messages == [{"role": "system", "content": "t20"}]
    assert capsys.readouterr().err.endswith("there is no question to take back\n")


def test_an_unknown_command_is_named_and_the_known_ones_are_listed(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(model, {"temperature": 0, "max_tokens": 1})
    type_in(monkeypatch, "/fast please\n")
    talk(conversation)
    told = capsys.readouterr()
    assert "unknown command /fast;" in told.err and "/undo" in told.err and told.out == ""
    assert conversation.messages == []


def test_thoughts_go_to_stderr_and_only_the_answer_is_remembered(
    thinker: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(thinker, {})
    type_in(monkeypatch, "<think>hm</think>yes\n")
    talk(conversation)
    told = capsys.readouterr()
    assert (told.out, told.err) == ("yes\n", "hm\n")
    assert conversation.messages[-1] == {"role": "assistant", "content": "yes"}


def test_an_answer_that_the_limit_ends_among_its_thoughts_says_so(
    thinker: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(thinker, {"max_tokens": 10})
    type_in(monkeypatch, "<think>hm, let me see</think>yes\n")
    talk(conversation)
    told = capsys.readouterr()
    assert told.out == "\n"
    assert (
        told.err
        == "hm,\n(the limit of 10 tokens was reached before the answer began; --max-tokens sets it)\n"
    )


def run_in_shell(words: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `levserve` with words that may be redirections too."""
    command = ["bash", "-c", f"{sys.executable} -m levserve {words}"]
    return subprocess.run(command, env=os.environ | environ, capture_output=True, timeout=COMPILE_SECONDS)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("generate - <<< $'caf\\xe9'", "levserve generate: error: stdin is not UTF-8 text\n"),
        ("generate - <&-", "levserve generate: error: stdin is closed\n"),
        ("chat <&-", "levserve chat: error: stdin is closed\n"),
    ],
)
def test_stdin_that_cannot_be_read_is_told_in_one_line(words: str, told: str) -> None:
    done = run_in_shell(words)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (2, b"", told)


def test_a_path_that_stdout_cannot_show_is_shown_with_question_marks(tmp_path: Path) -> None:
    model = tmp_path / "modèle"
    model.symlink_to(GOLDEN / "llama")
    done = run_in_shell(f"fetch '{model}'", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout.decode()) == (0, f"{tmp_path}/mod?le\n")


def test_a_line_of_a_chat_that_is_not_utf8_is_told_and_the_next_one_answered(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nt18\n"), "ascii")
    monkeypatch.setattr("sys.stdin", stdin)
    prepare_streams()
    talk(Conversation(model, {"temperature": 0, "max_tokens": 2}))
    told = capsys.readouterr()
    assert told.out == "t10 t11\n" and told.err.startswith("this line is not UTF-8 text\n")


def test_utf8_is_read_although_the_locale_is_ascii() -> None:
    assert as_utf8(b"caf\xc3\xa9".decode("ascii", "surrogateescape")) == "café"


@contextmanager
def terminal(kind: str = "xterm") -> Iterator[Callable[[], str]]:
    """Makes stderr a terminal with 20 columns; the function returns what was written to it."""
    reader, writer = pty.openpty()
    os.set_blocking(reader, False)

    def read() -> str:
        found = b""
        with suppress(BlockingIOError):
            while True:
                found += os.read(reader, 65536)
        return found.decode()

    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with pytest.MonkeyPatch.context() as patch, open(writer, "w", encoding="utf-8") as stderr:
        patch.setenv("TERM", kind)
        patch.setattr("sys.stderr", stderr)
        yield read
    os.close(reader)


def test_progress_fits_the_terminal_and_goes_away() -> None:
    with terminal() as read:
        with show_loading() as report:
            report("compiling " * 10)
            report("模型" * 20)
        assert read() == "\r\x1b[Kcompiling compiling\r\x1b[K模型模型模型模型模\r\x1b[K"


@pytest.mark.parametrize(("kind", "shown"), [("xterm", "\x1b[2mhm\x1b[0m\r\n"), ("dumb", "hm\r\n")])
def test_thoughts_are_dimmed_in_a_terminal_that_can_do_that(
    thinker: Model, kind: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "<think>hm</think>yes\n")
    with terminal(kind) as read:
        talk(Conversation(thinker, {}))
        assert read() == shown


def test_a_dumb_terminal_gets_no_progress() -> None:
    with terminal("dumb") as read:
        with show_loading() as report:
            report("compiling")
        print("end", file=sys.stderr, flush=True)
        assert read() == "end\r\n"


def test_ctrl_c_does_not_wait_for_what_a_model_still_compiles() -> None:
    closed: list[str] = []
    for end in (KeyboardInterrupt, ServeError("the device failed")):
        with (
            pytest.raises((KeyboardInterrupt, ServeError)),
            closing_unless_interrupted(lambda: closed.append("failed")),
        ):
            raise end
    with closing_unless_interrupted(lambda: closed.append("done")):
        pass
    assert closed == ["failed", "done"]


class LongTally(Tally):
    def describe_progress(self) -> str:
        return "50%, 5 requests, 2 failed, 10 s left"


@pytest.mark.parametrize(("kind", "shown"), [("xterm", "\r\x1b[K50%, 5 requests, 2 \r\x1b[K"), ("dumb", "")])
def test_the_progress_of_a_batch_fits_the_terminal_and_a_dumb_one_gets_no_escapes(
    kind: str, shown: str
) -> None:
    with terminal(kind) as read:
        reports = Reports()
        reports.show(LongTally(100))
        reports.end()
        assert read() == shown


@pytest.mark.parametrize(
    "words",
    [
        ["generate"],
        ["generate", "x", "--max-tokens", "many"],
        ["generate", "x", "--dtype", "int3"],
        ["generate", "x", "--port", "8000"],
        ["generate", "x", "--model", "/nowhere"],
        ["generate", "caf\udce9"],
        ["chat", "--system", "caf\udce9"],
        ["chat", "/nowhere"],
        ["chat", "--config", "/nowhere.ini"],
        ["generate", "x", "--env-file", "/nowhere.env"],
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
        "org/name@0123456789abcdef",
        str(tmp_path / "models" / "tiny"),
    ]
    assert "2 MB" in lines[1]


def list_models(cache: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """The name and the size of each model in a cache, besides the bundled one."""
    capsys.readouterr()
    assert cli.main(["models", "--cache-dir", str(cache)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    return [(name, f"{size} {unit}") for name, size, unit, *_ in rows if name != "smollm2-135m"]


def test_models_lists_gguf_files_of_the_hub_whose_parts_are_all_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = tmp_path / "hub" / "models--org--name-GGUF"
    for path in (
        "abc/name-Q8_0.gguf",
        "abc/mmproj-name.gguf",
        "abc/big/name-00001-of-00002.gguf",
        "abc/big/name-00002-of-00002.gguf",
        "abc/half-00001-of-00002.gguf",
        "def/name-Q4_0.gguf",
    ):
        file = repo / "snapshots" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\0" * 2_000_000)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    assert list_models(tmp_path, capsys) == [
        ("org/name-GGUF/big/name-00001-of-00002.gguf", "4 MB"),
        ("org/name-GGUF/name-Q8_0.gguf", "2 MB"),
        ("org/name-GGUF/name-Q4_0.gguf@def", "2 MB"),
    ]


def test_models_lists_what_came_from_stores_by_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web, cache = tmp_path / "web", tmp_path / "cache"
    shutil.copytree(GOLDEN / "llama", web / "llama")
    for name in ("one.gguf", "two-00001-of-00002.gguf", "two-00002-of-00002.gguf"):
        (web / name).write_bytes(b"\0" * 1_000_000)
    with web_store(web) as server:
        names = [f"{server.address}/{name}" for name in ("llama", "one.gguf", "two-00001-of-00002.gguf")]
        for name in names:
            assert cli.main(["fetch", name, "--cache-dir", str(cache)]) == 0
        secret = server.address.replace("http://", "http://user:word@")
        assert cli.main(["fetch", f"{secret}/one.gguf", "--cache-dir", str(cache)]) == 0
        listed = list_models(cache, capsys)
        assert cli.main(["fetch", listed[0][0], "--cache-dir", str(cache)]) == 0
    told = dict(listed)
    (unnamed,) = told.keys() - set(names)
    (cache / "stores" / "run").mkdir()
    (cache / "stores" / "run" / "metadata.json").write_text("{}")
    (cache / "stores" / "run" / ".address").write_text("gs://models/run/step-5")
    assert "gs://models/run/step-5" in dict(list_models(cache, capsys))
    assert [told[name] for name in names] == ["1 MB", "1 MB", "2 MB"]
    assert "word" not in unnamed and cli.main(["fetch", unnamed]) == 0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; an environment file in it changes variables for one test only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", dict(os.environ))
    return tmp_path


def test_a_settings_file_and_an_environment_file_work_for_commands(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "models").mkdir()
    (here / "models" / "tiny").symlink_to(GOLDEN / "llama")
    (here / ".env").write_text("LEVSERVE_MODELS_DIR=models\n")
    (here / "other.env").write_text("LEVSERVE_MODELS_DIR=nowhere\n")
    (here / "serve.ini").write_text("[server]\nport = 9000\n[model]\nmodels-dir = models\n")
    assert cli.main(["models"]) == 0
    assert "models/tiny " in capsys.readouterr().out
    del os.environ["LEVSERVE_MODELS_DIR"]  # which was set for libraries
    assert cli.main(["models", "--env-file", "other.env"]) == 2
    assert "nowhere" in capsys.readouterr().err
    del os.environ["LEVSERVE_MODELS_DIR"]
    (here / ".env").unlink()
    assert cli.main(["models", "--config", "serve.ini"]) == 0
    assert "models/tiny " in capsys.readouterr().out
    assert cli.main(["fetch", "tiny", "--config", "serve.ini"]) == 0
    assert capsys.readouterr().out == "models/tiny\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("LEVSERVE_DTYPE=int3", "not 'int3' (environment LEVSERVE_DTYPE from .env)"),
        ("LEVSERVE_DTIPE=int8", "did you mean LEVSERVE_DTYPE? (.env)"),
    ],
)
def test_a_mistake_in_an_environment_file_names_the_file(
    text: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / ".env").write_text(text)
    assert cli.main(["fetch", str(GOLDEN / "llama")]) == 2
    assert told in capsys.readouterr().err


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
