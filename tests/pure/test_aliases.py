"""Other servers' names for our settings: their meaning, what overrides them, how mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from levserve.settings.alias import ALIASES, FLAG_ALIASES
from levserve.settings.elsewhere import ADVICE
from levserve.settings.parse import parse_settings
from levserve.settings.settings import BY_NAME, SETTINGS
from tests.pure.test_config import SETTINGS_PAGE, refuse, serve_ini


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--max-batch-seqs", "8"], "max_running", 8),
        (["--max-batch-size=8"], "max_running", 8),
        (["--max-queue-tokens", "4096"], "max_inflight_tokens", 4096),
        (["--max-context-length", "2048"], "max_seq_len", 2048),
        (["--context-window", "2048"], "max_seq_len", 2048),
        (["--max-model-len", "2048"], "max_seq_len", 2048),
        (["--ctx-size", "2048"], "max_seq_len", 2048),
        (["--parallel", "8"], "max_running", 8),
        (["--alias", "chat,qwen"], "served_model_name", ("chat", "qwen")),
        (["org/name"], "model", "org/name"),
        (["serve", "org/name"], "model", "org/name"),
        (["--port", "1", "org/name", "--ui", "false"], "model", "org/name"),
        (["--model-path", "/srv/model"], "model", "/srv/model"),
        (["--tokenizer-path", "/srv/tokenizer"], "tokenizer", "/srv/tokenizer"),
        (["--enable-cors"], "cors_origins", ("*",)),
        (["--enable-cors", "true"], "cors_origins", ("*",)),
        (["--enable-cors=false"], "cors_origins", ()),
        (["--enable-cors", "--cors-origins", "*"], "cors_origins", ("*",)),
        (["--cors-origins", "https://a.example", "--enable-cors"], "cors_origins", ("https://a.example",)),
        (["--cors-origins", "https://a.example,https://b.example"], "cors_origins", ("https://a.example", "https://b.example")),
        (["--device", "cuda"], "device", "gpu"),
        (["--device", "gpu"], "device", "gpu"),
        (["--device", "rocm"], "device", "rocm"),
        (["--dtype", "float16"], "dtype", "bfloat16"),
        (["--dtype", "half"], "dtype", "bfloat16"),
        (["--open-metrics"], "open_metrics", True),
        (["--open-metrics", "--port", "1"], "open_metrics", True),
    ],
)  # fmt: skip
def test_a_flag_of_another_server_means_ours(flags: list[str], name: str, value: object) -> None:
    assert getattr(parse_settings(flags, {}), name) == value


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("PORT", "8080", "port", 8080),
        ("LOCAL_MODEL_CACHE", "/tmp/model_cache", "cache_dir", "/tmp/model_cache"),
        ("MAX_CACHED_MODELS", "2", "max_loaded_models", 2),
        ("MAX_CONCURRENT_REQUESTS", "50", "max_running", 50),
        ("REQUEST_TIMEOUT", "300", "request_timeout", 300.0),
        ("DEFAULT_MAX_TOKENS", "512", "default_max_tokens", 512),
        ("DEFAULT_TEMPERATURE", "0.7", "default_temperature", 0.7),
        ("LOCAL_DEV", "true", "max_running", 1),
        ("LOCAL_DEV", "true", "quantize", "int8"),
        ("LOCAL_DEV", "false", "max_running", 0),
        ("GCS_BUCKET", "brains", "models_dir", "gs://brains/models"),
        ("GCS_BUCKET", "gs://brains/", "model_store", "gs://brains/models"),
        ("GCS_BUCKET", "brains", "lazy", True),
        ("AIOS_MODEL_PATH", "/srv/model", "model", "/srv/model"),
        ("AIOS_TOKENIZER_PATH", "/srv/tokenizer", "tokenizer", "/srv/tokenizer"),
        ("AIOS_DEVICE", "cuda", "device", "gpu"),
        ("AIOS_MAX_BATCH_SIZE", "16", "max_running", 16),
        ("AIOS_MAX_NEW_TOKENS", "256", "max_new_tokens", 256),
        ("AIOS_CORS_ORIGINS", "*", "cors_origins", ("*",)),
    ],
)
def test_a_variable_of_another_server_means_ours_and_is_told(
    variable: str, text: str, name: str, value: object
) -> None:
    settings = parse_settings([], {variable: text})
    assert getattr(settings, name) == value
    if text != "false":
        assert settings.sources[name] == f"environment {variable}"
        assert any(
            note.startswith(f"{variable} is taken as {BY_NAME[name].flag} ") for note in settings.notes
        )


@pytest.mark.parametrize(
    ("prefix", "address"),
    [("models/", "gs://b/models"), ("a/b", "gs://b/a/b"), ("", "gs://b"), ("/", "gs://b")],
)
def test_the_prefix_of_a_bucket_is_the_folder_in_it(prefix: str, address: str) -> None:
    assert parse_settings([], {"GCS_BUCKET": "b", "GCS_MODEL_PREFIX": prefix}).models_dir == address


def test_a_prefix_without_a_bucket_is_told() -> None:
    assert parse_settings([], {"GCS_MODEL_PREFIX": "a"}).notes == (
        "GCS_MODEL_PREFIX is not used without GCS_BUCKET",
    )


def test_an_empty_variable_of_another_server_says_nothing() -> None:
    assert parse_settings([], {"PORT": "", "GCS_BUCKET": "", "LOCAL_DEV": ""}).sources == {}


def test_our_flag_and_our_variable_win_over_another_servers_variable_which_wins_over_the_file(
    tmp_path: Path,
) -> None:
    path = serve_ini(tmp_path, "[server]\nport = 7001\n")
    assert parse_settings(["--config", path], {"PORT": "7002"}).port == 7002
    own = parse_settings(["--config", path], {"PORT": "7002", "LEVSERVE_PORT": "7003"})
    assert (own.port, own.sources["port"]) == (7003, "environment LEVSERVE_PORT")
    assert (
        "PORT, which means --port 7002, is overridden by --port 7003 (environment LEVSERVE_PORT)" in own.notes
    )
    assert parse_settings(["--port", "7004"], {"PORT": "7002", "LEVSERVE_PORT": "7003"}).port == 7004


def test_a_flag_of_another_server_wins_over_our_variable() -> None:
    settings = parse_settings(["--max-batch-size", "4"], {"LEVSERVE_MAX_RUNNING": "8"})
    assert (settings.max_running, settings.sources["max_running"]) == (4, "command line, as --max-batch-size")


def test_what_local_dev_implies_gives_way_to_what_is_said() -> None:
    settings = parse_settings(["--quantize", "none"], {"LOCAL_DEV": "true", "MAX_CONCURRENT_REQUESTS": "5"})
    assert (settings.quantize, settings.max_running) == ("none", 5)


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--checkpoint-path"])
def test_a_flag_that_names_a_model_wins_over_another_servers_variable(flag: str) -> None:
    settings = parse_settings([flag, "org/name"], {"AIOS_MODEL_PATH": "/srv/model"})
    assert settings.model == "org/name"
    assert any(note.startswith(f"AIOS_MODEL_PATH is overridden by {flag}") for note in settings.notes)


def test_both_names_with_the_same_value_are_fine() -> None:
    assert (
        parse_settings(["--max-running", "8", "--max-batch-size", "8", "--max-num-seqs", "8"], {}).max_running
        == 8
    )


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (
            ["--max-running", "8", "--max-batch-size", "4"],
            {},
            ["--max-running 8 (command line)", "--max-batch-size 4 (command line, as --max-batch-size)"],
        ),
        (
            ["--max-batch-seqs", "8", "--max-batch-size", "4"],
            {},
            ["--max-batch-seqs 8", "--max-batch-size 4"],
        ),
        (["--model", "a", "--model-path", "b"], {}, ["--model a", "--model-path b"]),
        (
            [],
            {"MAX_CONCURRENT_REQUESTS": "50", "AIOS_MAX_BATCH_SIZE": "16"},
            ["MAX_CONCURRENT_REQUESTS 50", "AIOS_MAX_BATCH_SIZE 16"],
        ),
        (["--enable-cors", "false", "--cors-origins", "*"], {}, ["--enable-cors", "--cors-origins *"]),
    ],
)
def test_two_names_with_different_values_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], environ: dict[str, str], named: list[str]
) -> None:
    line = refuse(capsys, argv, environ)
    assert all(word in line for word in [*named, "two names of one setting"])


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--max-batch-size", "many"], {}, ["--max-running must be", "'many'", "(command line, as --max-batch-size)"]),
        ([], {"PORT": "http"}, ["--port must be", "'http'", "(environment PORT)"]),
        ([], {"LOCAL_DEV": "perhaps"}, ["LOCAL_DEV must be true or false", "'perhaps'"]),
        (["--enable-cors", "perhaps"], {}, ["--enable-cors must be true or false"]),
        (["--device", "mps"], {}, ["--device must be one of auto, cpu, gpu, rocm, tpu (cuda means gpu)", "'mps'"]),
        ([], {"LEVSERVE_MAX_BATCH_SIZE": "8"}, ["LEVSERVE_MAX_BATCH_SIZE", "did you mean LEVSERVE_MAX_RUNNING?"]),
        (["--max-batch-sise", "8"], {}, ["did you mean --max-batch-size?"]),
        (["--gpu-memory-utilization", "0.9"], {}, ["unknown option '--gpu-memory-utilization'; instead", "--kv-memory takes a size"]),
        (["--gpu-memory-utilization=0.9"], {}, ["unknown option '--gpu-memory-utilization';"]),
        (["-ngl", "99"], {}, ["unknown option '-ngl';", "--device"]),
        (["hf_checkpoint=org/name"], {}, ["unknown option 'hf_checkpoint'", "did you mean --hf-checkpoint?"]),
        (["a", "b"], {}, ["one model can be given, not a and b"]),
        (["a", "--model", "b"], {}, ["one model can be given, not a and b"]),
        (["a", "--model-path", "b"], {}, ["--model a", "--model-path b"]),
        (["a", "--checkpoint-path", "b"], {}, ["--model a (command line) and --checkpoint-path b", "exclude each other"]),
    ],
)  # fmt: skip
def test_a_mistake_in_another_servers_name_is_told(
    capsys: pytest.CaptureFixture[str], argv: list[str], environ: dict[str, str], named: list[str]
) -> None:
    line = refuse(capsys, argv, environ)
    assert all(word in line for word in named)


def test_aliases_are_keys_of_the_file_in_the_section_of_their_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = serve_ini(
        tmp_path, "[engine]\nmax-batch-size = 8\n[model.a]\nmodel-path = /srv/a\ncontext-window = 64\n"
    )
    settings = parse_settings(["--config", path], {})
    assert (settings.max_running, settings.sources["max_running"]) == (
        8,
        f"file {path}, [engine] max-batch-size",
    )
    assert (settings.models["a"].model, settings.models["a"].max_seq_len) == ("/srv/a", 64)
    assert parse_settings(["--config", path, "--max-running", "9"], {}).max_running == 9
    path = serve_ini(tmp_path, "[server]\nmax-batch-size = 8\n")
    assert "[server] max-batch-size: this key belongs in [engine]" in refuse(capsys, ["--config", path])
    path = serve_ini(tmp_path, "[engine]\nmax-batch-size = many\n")
    assert f"(file {path}, [engine] max-batch-size)" in refuse(capsys, ["--config", path])


@pytest.mark.parametrize(
    "text", ["[engine]\nmax-running = 8\nmax-batch-size = 4\n", "[model.a]\nmodel = x\nmodel-path = y\n"]
)
def test_two_names_with_different_values_are_refused_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    line = refuse(capsys, ["--config", serve_ini(tmp_path, text)])
    assert "max-batch-size" in line or "model-path" in line


def test_other_words_for_a_value_are_told() -> None:
    notes = parse_settings(["--dtype", "Float16", "--device", "cuda"], {}).notes
    assert notes == (
        "--dtype Float16 is taken as --dtype bfloat16",
        "--device cuda is taken as --device gpu",
    )


@pytest.mark.parametrize("flag", ["--model", "--hf-checkpoint", "--model-path"])
def test_a_model_may_carry_its_revision(flag: str) -> None:
    settings = parse_settings([flag, "org/name@refs/pr/7"], {})
    assert (settings.model, settings.revision) == ("org/name", "refs/pr/7")
    assert parse_settings([flag, "org/name@v1", "--revision", "v1"], {}).revision == "v1"


def test_a_path_with_an_at_sign_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model@best").mkdir(parents=True)
    assert parse_settings(["--model", "runs/model@best"], {}).model == "runs/model@best"
    assert parse_settings(["--model", "s3://b/org/name@v1"], {}).model == "s3://b/org/name@v1"
    tagged = parse_settings(["org/name:Q4_K_M@v1"], {})
    assert (tagged.model, tagged.revision) == ("org/name:Q4_K_M", "v1")


def test_two_revisions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = refuse(capsys, ["--model", "org/name@v1", "--revision", "v2"])
    assert "--model org/name@v1" in line and "--revision v2" in line


def test_every_alias_is_in_the_help_and_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--help"], {})
    out = capsys.readouterr().out
    rows = SETTINGS_PAGE.read_text()
    for alias in ALIASES:
        shown = alias.name if alias.is_variable else alias.flag
        assert shown in out and f"`{shown}`" in rows


def test_words_of_other_servers_for_a_value_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--help"], {})
    out = " ".join(capsys.readouterr().out.split())
    for setting in SETTINGS:
        for word, value in setting.kind.synonyms.items():
            assert f"{word} means {value}" in out
    assert "cuda means gpu" in out and "float16 means bfloat16" in out and "org/name@revision" in out


def test_every_alias_is_on_the_page_for_people_who_move() -> None:
    page = Path("docs/pages/how-to/move.md").read_text(encoding="utf-8")
    for alias in ALIASES:
        shown = alias.name if alias.is_variable else alias.flag
        assert f"`{shown}" in page, shown


def test_flags_that_have_no_counterpart_are_on_the_page_for_people_who_move_and_are_not_ours() -> None:
    page = Path("docs/pages/how-to/move.md").read_text(encoding="utf-8")
    assert [flag for flag in ADVICE if f"`{flag}" not in page] == []
    ours = {setting.flag for setting in SETTINGS} | {alias.flag for alias in FLAG_ALIASES.values()}
    assert not ours & ADVICE.keys()


def test_a_model_without_a_flag_wins_over_the_environment() -> None:
    settings = parse_settings(["org/name@v1"], {"LEVSERVE_MODEL": "other", "AIOS_MODEL_PATH": "/srv/model"})
    assert (settings.model, settings.revision, settings.sources["model"]) == (
        "org/name",
        "v1",
        "command line",
    )


def test_an_alias_is_no_setting_of_ours_and_stands_for_one() -> None:
    assert {alias.setting for alias in ALIASES} <= BY_NAME.keys()
    assert not FLAG_ALIASES.keys() & {setting.key for setting in SETTINGS}
