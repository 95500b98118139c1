"""Where settings come from, which of two sources wins, and how each mistake is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from levserve import __version__
from levserve.errors import ConfigError
from levserve.settings.parse import parse_settings
from levserve.settings.program import make_settings
from levserve.settings.settings import SETTINGS, Settings

MIB = 2**20
SETTINGS_PAGE = Path(__file__).parents[2] / "docs" / "pages" / "reference" / "settings.md"


def serve_ini(folder: Path, text: str) -> str:
    path = folder / "serve.ini"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refuse(capsys: pytest.CaptureFixture[str], argv: list[str], environ: dict[str, str] | None = None) -> str:
    """The one line on stderr that reports a mistake."""
    with pytest.raises(SystemExit) as stopped:
        parse_settings(argv, environ or {})
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out == ""
    assert err.startswith("levserve: error: ") and err.endswith("\n") and err.count("\n") == 1
    return err


def run_program(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    program = [
        sys.executable,
        "-W",
        "error",
        "-c",
        "from levserve.settings.parse import parse_settings; parse_settings()",
        *argv,
    ]
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("LEVSERVE_", "LEVANTER_"))
    }
    return subprocess.run(program, env=clean | environ, capture_output=True, text=True, timeout=60)


def test_nothing_given_gives_the_defaults() -> None:
    settings = parse_settings([], {})
    assert settings == Settings()
    assert (settings.model, settings.host, settings.port, settings.max_body_bytes) == (
        "smollm2-135m",
        "127.0.0.1",
        8000,
        4 * MIB,
    )
    assert {row.source for row in settings.describe()} == {"default"}


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    path = serve_ini(tmp_path, "[server]\nhost = 10.0.0.1\nport = 7001\ndrain-seconds = 5\n")
    settings = parse_settings(
        ["--config", path, "--host", "10.0.0.3"], {"LEVSERVE_HOST": "10.0.0.2", "LEVSERVE_PORT": "7002"}
    )
    assert (settings.host, settings.port, settings.drain_seconds, settings.log_level) == (
        "10.0.0.3",
        7002,
        5.0,
        "info",
    )
    assert settings.sources == {
        "host": "command line",
        "port": "environment LEVSERVE_PORT",
        "drain_seconds": f"file {path}",
    }


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("api-key = abc # for staff", "abc"),
        ("api-key = abc\t# for staff", "abc"),
        ("api-key = abc#def", "abc#def"),
        ("api-key = abc#def #ghi", "abc#def"),
        ("api-key = abc;def", "abc;def"),
        ("api-key = # none", ""),
        ("# api-key = abc", ""),
        ("; api-key = abc", ""),
        ("  # api-key = abc", ""),
    ],
)
def test_a_hash_after_white_space_begins_a_comment_in_the_file(tmp_path: Path, line: str, key: str) -> None:
    path = serve_ini(tmp_path, f"[server]  # who may call\nport = 7001 # not 8000\n{line}\nhost = ::1\n")
    settings = parse_settings(["--config", path], {})
    assert (settings.port, settings.api_key, settings.host) == (7001, key, "::1")


def test_a_semicolon_begins_no_comment_within_a_line_of_the_file(tmp_path: Path) -> None:
    path = serve_ini(tmp_path, "[model]\nchat-template = abc ; def\n")
    assert parse_settings(["--config", path], {}).chat_template == "abc ; def"


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_white_space_around_a_key_is_no_part_of_it(name: str) -> None:
    settings = parse_settings([], {f"LEVSERVE_{name.upper()}": " secret\n"})
    assert getattr(settings, name) == "secret"


@pytest.mark.parametrize("key", ["two words", "clé", "a\x00b"])
def test_a_key_that_no_client_can_send_is_refused_without_showing_it(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_settings([], {"LEVSERVE_API_KEY": key})
    told = capsys.readouterr().err
    assert "--api-key must be visible ASCII characters without spaces" in told and key not in told
    path = tmp_path / "keys"
    path.write_text(f"good\n{key}\n")
    with pytest.raises(SystemExit):
        parse_settings(["--api-key-file", str(path)], {})
    told = capsys.readouterr().err
    assert "line 2 has" in told and key not in told


def test_a_hash_in_a_flag_or_in_the_environment_stands_for_itself() -> None:
    name = "100%s # = : name"
    assert parse_settings(["--tokenizer", name], {}).tokenizer == name
    assert parse_settings([], {"LEVSERVE_TOKENIZER": name}).tokenizer == name


@pytest.mark.parametrize("given_in", ["flag", "environment", "file"])
@pytest.mark.parametrize(
    ("name", "section", "text", "value"),
    [
        ("port", "server", "0", 0),
        ("port", "server", "65535", 65535),
        ("api_key", "server", "100%s#=:;key", "100%s#=:;key"),
        ("tokenizer", "model", "100%s# = : ;name", "100%s# = : ;name"),
        ("api_key", "server", "", ""),
        ("api_key", "server", "--port=1", "--port=1"),
        ("request_timeout", "limits", "0.5", 0.5),
        ("dtype", "model", "bfloat16", "bfloat16"),
        ("log_level", "log", "DEBUG", "debug"),
        ("page_size", "engine", "16", 16),
        ("kv_memory", "engine", "512MiB", 512 * MIB),
        ("kv_memory", "engine", "2 GiB", 2048 * MIB),
        ("kv_memory", "engine", "1.5GB", 1_500_000_000),
        ("kv_memory", "engine", "4096", 4096),
        ("max_body_bytes", "limits", "64kB", 64_000),
        ("seed", "engine", "7", 7),
        ("seed", "engine", "", None),
        ("compile_cache", "engine", "false", False),
        ("compile_cache", "engine", "On", True),
        ("cache_dir", "model", "~/levserve", os.path.expanduser("~/levserve")),
        ("open_metrics", "server", "true", True),
        ("cors_origins", "server", "*", ("*",)),
        (
            "cors_origins",
            "server",
            "https://A.example  http://localhost:3000",
            ("https://a.example", "http://localhost:3000"),
        ),
        ("cors_origins", "server", "", ()),
    ],
)
def test_a_value_reads_the_same_from_every_source(
    tmp_path: Path, given_in: str, name: str, section: str, text: str, value: object
) -> None:
    key = name.replace("_", "-")
    if given_in == "flag":
        settings = parse_settings([f"--{key}={text}"], {})
    elif given_in == "environment":
        settings = parse_settings([], {f"LEVSERVE_{name.upper()}": text})
    else:
        settings = parse_settings(
            [], {"LEVSERVE_CONFIG": serve_ini(tmp_path, f"[{section}]\n{key} = {text}\n")}
        )
    assert getattr(settings, name) == value


@pytest.mark.parametrize("given_in", ["flag", "environment", "file"])
@pytest.mark.parametrize(
    ("name", "section", "text"),
    [
        ("port", "server", "http"),
        ("port", "server", "65536"),
        ("port", "server", "-1"),
        ("port", "server", ""),
        ("host", "server", ""),
        ("model", "model", " "),
        ("drain_seconds", "server", "soon"),
        ("drain_seconds", "server", "nan"),
        ("request_timeout", "limits", "inf"),
        ("inter_token_goal_ms", "engine", "0"),
        ("page_size", "engine", "24"),
        ("page_size", "engine", "512"),
        ("kv_memory", "engine", "2 bananas"),
        ("kv_memory", "engine", "1.5"),
        ("kv_memory", "engine", "-1GiB"),
        ("max_body_bytes", "limits", "0"),
        ("compile_cache", "engine", "maybe"),
        ("device", "engine", "quantum"),
        ("seed", "engine", "1.5"),
        ("seed", "engine", str(2**63)),
        ("cors_origins", "server", "example.org"),
        ("cors_origins", "server", "https://example.org/"),
        ("cors_origins", "server", "* https://example.org"),
        ("cors_origins", "server", "https://*.example.org"),
        ("max_sockets", "limits", "-1"),
    ],
)
def test_a_bad_value_is_refused_with_option_value_and_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given_in: str, name: str, section: str, text: str
) -> None:
    key, variable = name.replace("_", "-"), f"LEVSERVE_{name.upper()}"
    if given_in == "flag":
        line, source = refuse(capsys, [f"--{key}={text}"]), "(command line)"
    elif given_in == "environment":
        line, source = refuse(capsys, [], {variable: text}), f"(environment {variable})"
    else:
        path = serve_ini(tmp_path, f"[{section}]\n{key} = {text}\n")
        line, source, text = (
            refuse(capsys, ["--config", path]),
            f"(file {path}, [{section}] {key})",
            text.strip(),
        )
    assert f"--{key} must be" in line and repr(text) in line and source in line


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[sever]\nport = 1\n", ["[sever]", "server"]),
        ("[Server]\nport = 1\n", ["[Server]", "server"]),
        ("[DEFAULT]\nport = 1\n", ["[DEFAULT]"]),
        ("[server]\nprot = 1\n", ["[server] prot", "did you mean port?"]),
        ("[engine]\nmax_running = 1\n", ["[engine] max_running", "did you mean max-running?"]),
        ("[engine]\nport = 1\n", ["[engine] port", "belongs in [server]"]),
        ("[server]\nport = 1\nport = 2\n", ["line 3", "port", "twice"]),
        ("[server]\nport = 1\n[log]\n[server]\nhost = a\n", ["line 4", "[server]", "twice"]),
        ("port = 1\n", ["line 1"]),
        ("[server]\nport\n", ["line 2"]),
        ("[server]\nport: 1\n", ["line 2"]),
        ("[server]\nhost = localhost\n  port = 1\n", ["[server] host", "indented"]),
        ("[server]\nhost = 'localhost'\n", ["[server] host", "quotes"]),
        ("[server]\ndry-run = true\n", ["[server] dry-run"]),
        ("[server]\nconfig = other.ini\n", ["[server] config"]),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: list[str]
) -> None:
    path = serve_ini(tmp_path, text)
    line = refuse(capsys, ["--config", path])
    assert all(word in line for word in [path, *named])


@pytest.mark.parametrize(
    "text", ["[server]\napi-key hunter2\n", "api-key = hunter2\n", "[server]\napi-key = 'hunter2'\n"]
)
def test_a_mistake_beside_the_secret_does_not_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert "hunter2" not in refuse(capsys, ["--config", serve_ini(tmp_path, text)])


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latin.ini"
    path.write_bytes(b"[server]\nhost = caf\xe9\n")
    assert str(path) in refuse(capsys, ["--config", str(path)])


@pytest.mark.parametrize("path", ["missing.ini", "", "."])
def test_a_file_that_cannot_be_read_is_refused_with_its_source(
    capsys: pytest.CaptureFixture[str], path: str
) -> None:
    by_flag = refuse(capsys, ["--config", path])
    by_environment = refuse(capsys, [], {"LEVSERVE_CONFIG": path})
    assert "--config" in by_flag and path in by_flag and "(command line)" in by_flag
    assert path in by_environment and "(environment LEVSERVE_CONFIG)" in by_environment


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--prot", "1"], ["'--prot'", "did you mean --port?"]),
        (["--max_running=1"], ["'--max_running'", "did you mean --max-running?"]),
        (["--max-run", "1"], ["'--max-run'"]),
        (["--no-compile-cache"], ["'--no-compile-cache'", "did you mean --compile-cache?"]),
        (["serve", "a", "serve"], ["a and serve"]),
        (["--port"], ["--port"]),
        (["--config"], ["--config"]),
        (["--dry-run=yes"], ["--dry-run"]),
    ],
)
def test_a_mistake_on_the_command_line_is_named(
    capsys: pytest.CaptureFixture[str], argv: list[str], named: list[str]
) -> None:
    line = refuse(capsys, argv)
    assert all(word in line for word in [*named, "(command line)"])


def test_the_value_of_an_unknown_flag_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hunter2" not in refuse(capsys, ["--apikey=hunter2"])


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("LEVSERVE_MAX_RUNING", "LEVSERVE_MAX_RUNNING"),
        ("LEVSERVE_DRY_RUN", ""),
        ("LEVSERVE_PRINT_CONFIG", ""),
    ],
)
def test_an_unknown_variable_of_ours_is_refused(
    capsys: pytest.CaptureFixture[str], variable: str, nearest: str
) -> None:
    line = refuse(capsys, [], {"HOME": "/root", variable: "1"})
    assert variable in line and nearest in line


def test_a_setting_for_several_models_is_told_to_be_of_no_use_for_one() -> None:
    note = "--models-memory (command line) is not used: it applies only to several models"
    assert note in parse_settings(["--models-memory", "1GB"], {}).notes
    assert note not in parse_settings(["--models-memory", "1GB", "--models-dir", "/srv"], {}).notes
    assert note not in parse_settings(["--models-memory", "1GB", "--lazy"], {}).notes


def test_hf_checkpoint_is_another_name_for_model() -> None:
    settings = parse_settings([], {"LEVSERVE_HF_CHECKPOINT": "org/name"})
    assert (settings.model, settings.sources["model"]) == ("org/name", "environment LEVSERVE_HF_CHECKPOINT")


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (
            ["--model", "a", "--hf-checkpoint", "b"],
            {},
            ["--model a (command line)", "--hf-checkpoint b (command line)"],
        ),
        (
            ["--model", "a"],
            {"LEVSERVE_HF_CHECKPOINT": "b"},
            ["--model a", "--hf-checkpoint b (environment LEVSERVE_HF_CHECKPOINT)"],
        ),
        (["--kv-pages", "9", "--kv-memory", "1GiB"], {}, ["--kv-pages 9", "--kv-memory 1GiB"]),
    ],
)
def test_two_settings_that_exclude_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], environ: dict[str, str], named: list[str]
) -> None:
    line = refuse(capsys, argv, environ)
    assert all(word in line for word in named)


def test_one_of_two_excluding_settings_can_be_taken_back_by_a_flag() -> None:
    settings = parse_settings(["--kv-pages", "0", "--kv-memory", "1GiB"], {"LEVSERVE_KV_PAGES": "9"})
    assert (settings.kv_pages, settings.kv_memory) == (0, 1024 * MIB)


def test_the_secret_is_in_no_description_and_no_repr() -> None:
    settings = parse_settings(["--api-key", "hunter2", "--dry-run"], {})
    assert settings.api_key == "hunter2" and settings.dry_run
    assert "hunter2" not in repr(settings)
    assert ("api_key", "***", "command line") in settings.describe()


@pytest.mark.parametrize(
    ("argv", "environ", "key", "source"),
    [
        ([], {"LEVANTER_API_KEY": "lev"}, "lev", "environment LEVANTER_API_KEY"),
        ([], {"LEVANTER_API_KEY": "lev", "LEVSERVE_API_KEY": "own"}, "own", "environment LEVSERVE_API_KEY"),
        ([], {"LEVANTER_API_KEY": "lev", "LEVSERVE_API_KEY": ""}, "lev", "environment LEVANTER_API_KEY"),
        (["--api-key", "flag"], {"LEVANTER_API_KEY": "lev"}, "flag", "command line"),
        (["--api-key", ""], {"LEVANTER_API_KEY": "lev"}, "", "command line"),
        ([], {"LEVANTER_API_KEY": ""}, "", "default"),
    ],
)
def test_levanters_own_variable_is_used_when_ours_is_not_set(
    argv: list[str], environ: dict[str, str], key: str, source: str
) -> None:
    settings = parse_settings(argv, environ)
    assert settings.api_key == key
    assert ("api_key", "***" if key else "(empty)", source) in settings.describe()


def test_levanters_variable_wins_over_the_file_as_ours_does(tmp_path: Path) -> None:
    path = serve_ini(tmp_path, "[server]\napi-key = from-file\n")
    assert parse_settings(["--config", path], {}).api_key == "from-file"
    assert parse_settings(["--config", path], {"LEVANTER_API_KEY": "lev"}).api_key == "lev"


def test_a_file_of_keys_is_read_without_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# staff\nalice-key\n\n  bob-key   # since May\ncarol#key\n", encoding="utf-8")
    settings = parse_settings(["--api-key-file", str(path)], {})
    assert settings.api_keys == ("alice-key", "bob-key", "carol#key")
    assert parse_settings(["--api-key-file", str(path), "--api-key", "mine"], {}).api_keys[0] == "mine"
    assert not any("bob" in text for text in (repr(settings), str(settings.describe())))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "no key"),
        (b"# alice-key\n \n", "no key"),
        (b"alice-key\nbob key\n", "line 2"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    line = refuse(capsys, [], {"LEVSERVE_API_KEY_FILE": str(path)})
    assert f"--api-key-file {path} (environment LEVSERVE_API_KEY_FILE)" in line and words in line
    assert "alice" not in line and "bob" not in line


def test_a_folder_is_no_file_of_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Is a directory" in refuse(capsys, ["--api-key-file", str(tmp_path)])


def test_print_config_shows_every_value_with_its_source(tmp_path: Path) -> None:
    path = serve_ini(tmp_path, "[engine]\nkv-memory = 1GiB\n")
    done = run_program("--print-config", "--port", "9000", LEVSERVE_API_KEY="hunter2", LEVSERVE_CONFIG=path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "port = 9000 (command line)" in lines
    assert "api-key = *** (environment LEVSERVE_API_KEY)" in lines
    assert f"kv-memory = 1GiB (file {path})" in lines
    assert "host = 127.0.0.1 (default)" in lines
    assert [line.split(" ")[0] for line in lines if not line.startswith("[")] == [
        setting.key for setting in SETTINGS
    ]


def test_print_config_refuses_what_a_start_would_refuse() -> None:
    done = run_program("--print-config", LEVSERVE_PORT="http")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "LEVSERVE_PORT" in done.stderr


def test_a_value_that_is_not_printable_stays_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\\n" in refuse(capsys, ["--port", "1\n2"])
    settings = parse_settings(["--revision", "a\nb\udcff"], {})
    assert ("revision", "'a\\nb\\udcff'", "command line") in settings.describe()


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_settings(["--version"], {"LEVSERVE_TYPO": "1"})
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"levserve {__version__}\n")


def test_the_module_is_the_command() -> None:
    program = [sys.executable, "-m", "levserve", "--version"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"levserve {__version__}\n")


def test_help_teaches_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_settings(["--help", "--config", "missing.ini"], {})
    out = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    for setting in SETTINGS:
        assert f"{setting.flag} {setting.kind.metavar}" in out or f"It is {setting.kind.words}." in out
        if setting.kind.show(setting.default):
            assert f"[default {setting.show(setting.default)}]" in out
        assert f"[{setting.section}]" in out


def test_every_field_of_settings_but_eight_is_a_setting_in_the_table() -> None:
    names = {field.name for field in fields(Settings)} - {
        "models",
        "most_devices",
        "dry_run",
        "faults",
        "notes",
        "sources",
        "file_keys",
        "admin_file_keys",
    }
    assert {setting.name for setting in SETTINGS} == names
    rows = [row for row in SETTINGS_PAGE.read_text().splitlines() if row.startswith("| `--")]
    assert {row.count("|") for row in rows} == {6}
    assert all(sum(f"`{setting.flag}`" in row for row in rows) == 1 for setting in SETTINGS)


@pytest.mark.parametrize(
    ("cache_dir", "xdg", "expected"),
    [
        ("/data", "/xdg", "/data"),
        ("", "/xdg", "/xdg/levserve"),
        ("", "", "/home/me/.cache/levserve"),
        ("", "relative", "/home/me/.cache/levserve"),
    ],
)
def test_cache_path_follows_cache_dir_then_xdg_then_home(
    monkeypatch: pytest.MonkeyPatch, cache_dir: str, xdg: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert Settings(cache_dir=cache_dir).cache_path == Path(expected)


def test_importing_the_settings_does_not_import_jax() -> None:
    program = "import levserve.settings.parse, sys; sys.exit('jax' in sys.modules or 'flask' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", program], timeout=60).returncode == 0


MODELS = """\
[model]                         # for all of them
dtype = float32
tokenizer = /srv/other
[engine]
kv-memory = 1GiB
[model.one]
model = /srv/one
[model.org/two]                 # is looked up by its name
kv-pages = 64                   # in place of the memory above
load = start
served-model-name = second
"""


def test_sections_of_models_have_what_is_meant_for_all_and_their_own(tmp_path: Path) -> None:
    path = serve_ini(tmp_path, MODELS)
    settings = parse_settings(["--config", path], {})
    one, two = settings.models["one"], settings.models["second"]
    assert settings.has_several and not one.has_several
    assert (one.model, one.dtype, one.tokenizer, one.served_model_name, one.kv_memory) == (
        "/srv/one",
        "float32",
        "",
        ("one",),
        1024 * MIB,
    )
    assert (two.model, two.dtype, two.load, two.kv_memory, two.kv_pages) == (
        "org/two",
        "float32",
        "start",
        0,
        64,
    )
    assert parse_settings([], {}).has_several is False


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[model.a]\nmodell = x\n", "[model.a] modell: unknown key; did you mean model?"),
        (
            "[model.a]\nport = 1\n",
            "[model.a] port: this key applies to all models and belongs in [server]",
        ),
        ("[model.a]\nmodels-dir = x\n", "[model.a] models-dir: this key applies to all models"),
        ("[model.a]\ndtype = int3\n", "[model.a] dtype)"),
        ("[model.a]\nmodel = x\ncheckpoint-path = y\n", "exclude each other"),
        ("[model.]\nmodel = x\n", "unknown section [model.]"),
        (
            "[model.a]\nserved-model-name = b\n[model.b]\nmodel = x\n",
            "another model already has the name 'b'",
        ),
        ("[modell.a]\nmodel = x\n", "unknown section [modell.a]"),
    ],
)
def test_mistakes_in_a_models_section_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, told: str
) -> None:
    assert told in refuse(capsys, ["--config", serve_ini(tmp_path, text)])


def test_print_config_shows_what_a_models_section_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--config", serve_ini(tmp_path, MODELS), "--print-config"], {})
    shown = capsys.readouterr().out.split("[model.second]")[1]
    assert [" ".join(line.split()) for line in shown.strip().splitlines()] == [
        "model = org/two",
        "tokenizer = (empty)",
        "served-model-name = second",
        "load = start",
        "kv-memory = 0",
        "kv-pages = 64",
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ["--served-model-name", "a", "b/c", "--port", "1"],
        ["--port", "1", "--served-model-name", "a", "b/c"],
        ["--port", "1", "--served-model-name", "a b/c"],
        ["--port", "1", "--served-model-name=a b/c"],
    ],
)
def test_a_model_may_have_several_names(argv: list[str]) -> None:
    settings = parse_settings(argv, {})
    assert (settings.served_model_name, settings.main_name, settings.port) == (("a", "b/c"), "a", 1)


def test_two_models_may_not_share_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = serve_ini(tmp_path, "[model.one]\nserved-model-name = a b\n[model.two]\nserved-model-name = b")
    with pytest.raises(SystemExit):
        parse_settings(["--config", path], {})
    assert "another model already has the name 'b'" in capsys.readouterr().err


def test_a_program_may_name_the_files_that_a_server_reads(tmp_path: Path) -> None:
    path = serve_ini(
        tmp_path, "[server]\nport = 7001\n[engine]\npage-size = 64\nmax-running = 3\nthreads = 2\n"
    )
    (tmp_path / "other.env").write_text("LEVSERVE_MAX_RUNNING=4\nLEVSERVE_THREADS=5\n")
    files = {"config": path, "env_file": tmp_path / "other.env"}
    settings = make_settings({**files, "threads": 6}, {})
    assert (settings.page_size, settings.max_running, settings.threads) == (64, 4, 6)
    assert settings.sources["max_running"].endswith("other.env")
    assert make_settings({"config": None, "env_file": None}, {}).max_running == Settings().max_running
    with pytest.raises(ConfigError, match="--config: cannot read 'nowhere.ini'"):
        make_settings({"config": "nowhere.ini"}, {})


def test_credentials_need_the_origins_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    line = refuse(capsys, ["--cors-origins", "*", "--cors-credentials", "true"])
    assert "--cors-credentials true (command line) needs the origins by name" in line
    listed = ["--cors-origins", "https://a.example", "https://b.example", "--cors-credentials", "true"]
    assert parse_settings(listed, {}).cors_origins == ("https://a.example", "https://b.example")
