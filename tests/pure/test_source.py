"""What `--model` may name, and how a model is fetched from the Hugging Face Hub, here a small local one."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from levserve.errors import ConfigError, StartupError
from levserve.settings.parse import parse_settings
from levserve.weights.source import (
    ModelFiles,
    check_model,
    check_source,
    find_model,
    find_source,
    stored_name,
)

GOLDEN = Path(__file__).parents[1] / "golden"
COMMIT = "c0ffee" * 6 + "cafe"


def find(model: str, cache_path: Path, revision: str = "main") -> ModelFiles:
    return find_model(model, revision=revision, cache_path=cache_path, report=print)


# Local files


def test_folder_is_served_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(str(GOLDEN / "llama"), tmp_path) == ModelFiles("llama", GOLDEN / "llama")
    monkeypatch.chdir(GOLDEN / "llama")
    assert find(".", tmp_path).name == "llama"


def test_gguf_file_is_served_under_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "Tiny.Q4_0.gguf"
    path.write_bytes(b"GGUF")
    assert find(str(path), tmp_path) == ModelFiles("Tiny.Q4_0", path)


def test_gguf_files_in_parts_are_one_model(tmp_path: Path) -> None:
    path = tmp_path / "Tiny-00001-of-00002.gguf"
    path.write_bytes(b"GGUF")
    assert find(str(path), tmp_path) == ModelFiles("Tiny", path)


def test_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(GOLDEN))
    assert find("~/llama", tmp_path) == ModelFiles("llama", GOLDEN / "llama")


@pytest.mark.parametrize(
    "model",
    [
        "smollm2-135m",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "org/name_1.5",
        "org/name:Q4_K_M",
        "hf.co/org/name:Q4_K_M",
        "org/name/Q4/model-00001-of-00002.gguf",
        str(GOLDEN / "llama"),
    ],
)
def test_what_may_be_a_model_passes_the_check(model: str) -> None:
    check_model(model)


@pytest.mark.parametrize(
    "model",
    ["", "smollm3", "/no/such/folder", "./missing", "a/b/c", "models/missing.gguf", "org/na me", "-/x"],
)
def test_model_that_cannot_be_is_refused_with_what_is_accepted(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        check_model(model)
    assert repr(model) in str(refusal.value) and "smollm2-135m, a folder with config.json" in str(
        refusal.value
    )


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([], "without config.json"),
        (["model.safetensors"], "without config.json"),
        (["config.json", "training_args.bin"], r"without \*\.safetensors or pytorch_model\*\.bin"),
    ],
)
def test_folder_that_is_not_a_model_is_refused(files: list[str], problem: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=problem):
        check_model(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("tiny.gguf", "it has tiny.gguf: name that file"),
        ("step-100/metadata.json", "--checkpoint-path serves"),
        ("llama/config.json", "it has llama/config.json: name that folder"),
    ],
)
def test_folder_that_has_a_model_in_it_says_how_to_serve_that(file: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=f"is a folder without config.json; .*{hint}"):
        check_model(str(tmp_path))


def test_file_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=r"unknown type \(\.bin\)"):
        check_model(str(tmp_path / "model.bin"))


def test_choosing_a_model_does_not_import_jax() -> None:
    script = "import sys, levserve.weights.source; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=GOLDEN.parent.parent)


# The Hub


class FakeHub(BaseHTTPRequestHandler):
    """Serves the llama folder as org/llama, with the parts of the Hub's protocol that a download needs."""

    files = {path.name: path.read_bytes() for path in (GOLDEN / "llama").iterdir()} | {
        "pytorch_model.bin": b"x",
        "onnx/model.json": b"{}",
    }

    def do_GET(self) -> None:
        api, resolve = "/api/models/org/llama", f"/org/llama/resolve/{COMMIT}/"
        if self.path.startswith(f"{api}/revision/main"):
            self.answer(
                json.dumps(
                    {
                        "id": "org/llama",
                        "sha": COMMIT,
                        "siblings": [{"rfilename": name} for name in self.files],
                    }
                ).encode()
            )
        elif self.path.startswith(f"{api}/revision/"):
            self.answer(b"{}", status=404, headers={"X-Error-Code": "RevisionNotFound"})
        elif self.path.startswith(f"{api}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": oid(data)}
                for name, data in self.files.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif self.path.startswith(resolve):
            data = self.files[self.path.removeprefix(resolve)]
            self.answer(data, headers={"ETag": f'"{oid(data)}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (
            {"Content-Length": str(len(body)), "Content-Type": "application/json"} | (headers or {})
        ).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    use_endpoint(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, name="fake-hub")
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url),
    )
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.usefixtures("hub")
def test_repository_is_fetched_without_what_serving_does_not_need(tmp_path: Path) -> None:
    files = find("org/llama", tmp_path)
    assert files.name == "org/llama" and files.path.is_relative_to(tmp_path)
    fetched = {path.name: path.read_bytes() for path in files.path.iterdir()}
    assert fetched == {path.name: path.read_bytes() for path in (GOLDEN / "llama").iterdir()}


@pytest.mark.usefixtures("hub")
def test_empty_revision_is_the_main_branch(tmp_path: Path) -> None:
    assert find("org/llama", tmp_path, revision="") == find("org/llama", tmp_path, revision="main")


@pytest.mark.usefixtures("hub")
def test_repository_in_the_cache_is_found_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = find("org/llama", tmp_path)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert find("org/llama", tmp_path) == files


def test_unreachable_hub_is_one_line_that_names_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(StartupError) as refusal:
        find("org/name", tmp_path)
    assert str(refusal.value).startswith("cannot fetch org/name from the Hugging Face Hub: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("hub")
def test_path_that_looks_like_a_repository_is_told_to_be_missing_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match="the folder models here has no lama$"):
        find("models/lama", tmp_path)


@pytest.mark.usefixtures("hub")
def test_unknown_repository_and_revision_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(
        StartupError, match="cannot fetch org/other: no such model on the Hub, or a private one"
    ):
        find("org/other", tmp_path)
    with pytest.raises(StartupError, match="cannot fetch org/llama: it has no revision 'v9'"):
        find("org/llama", tmp_path, revision="v9")


@pytest.mark.usefixtures("hub")
def test_files_of_pytorch_are_fetched_where_there_are_no_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"config.json": b"{}", "pytorch_model.bin": b"x", "training_args.bin": b"y"}
    monkeypatch.setattr(FakeHub, "files", old)
    found = find("org/llama", tmp_path / "old").path
    assert {path.name for path in found.iterdir()} == {"config.json", "pytorch_model.bin"}
    monkeypatch.setattr(FakeHub, "files", old | {"model.safetensors": b"z"})
    found = find("org/llama", tmp_path / "both").path
    assert {path.name for path in found.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.usefixtures("hub")
def test_repository_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHub, "files", {"config.json": b"{}", "training_args.bin": b"x"})
    with pytest.raises(
        StartupError, match=r"'org/llama' on the Hugging Face Hub is a folder without \*\.safetensors"
    ):
        find("org/llama", tmp_path)


GGUF_FILES = (
    "README.md",
    "mmproj-Q4_K_M.gguf",
    "tiny-q4_k_m.gguf",
    "tiny-Q4_K_S.gguf",
    "tiny-IQ4_XS.gguf",
    "tiny-Q8_0.gguf",
    "UD/tiny-UD-Q8_0.gguf",
    "BF16/tiny-BF16-00001-of-00002.gguf",
    "BF16/tiny-BF16-00002-of-00002.gguf",
)


@pytest.fixture
def gguf_hub(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHub, "files", {name: name.encode() for name in GGUF_FILES})


@pytest.mark.usefixtures("gguf_hub")
@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("org/llama:Q4_K_M", "tiny-q4_k_m.gguf"),
        ("hf.co/org/llama:iq4_xs", "tiny-IQ4_XS.gguf"),
        ("org/llama:UD-Q8_0", "UD/tiny-UD-Q8_0.gguf"),
        ("org/llama:tiny-Q8_0.gguf", "tiny-Q8_0.gguf"),
        ("org/llama/UD/tiny-UD-Q8_0.gguf", "UD/tiny-UD-Q8_0.gguf"),
        ("org/llama:BF16", "BF16/tiny-BF16-00001-of-00002.gguf"),
        ("org/llama/BF16/tiny-BF16-00002-of-00002.gguf", "BF16/tiny-BF16-00001-of-00002.gguf"),
    ],
)
def test_gguf_file_of_the_hub_is_fetched_with_its_parts_and_nothing_else(
    model: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = find(model, tmp_path)
    assert files.name == model and files.path.as_posix().endswith(f"/{path}")
    fetched = {file.name: file.read_bytes().decode() for file in files.path.parent.glob("*.gguf")}
    wanted = [name for name in GGUF_FILES if name == path or ("BF16" in path and "BF16" in name)]
    assert fetched == {Path(name).name: name for name in wanted}
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert find(model, tmp_path) == files


@pytest.mark.usefixtures("gguf_hub")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "org/llama:Q8_0",
            "Q8_0 matches 2 GGUF files; name one as org/llama/UD/tiny-UD-Q8_0.gguf, tiny-Q8_0.gguf$",
        ),
        (
            "org/llama:Q4_K",
            "Q4_K matches none of its GGUF files; name one as org/llama/BF16/tiny-BF16-00001-of-00002.gguf, ",
        ),
        ("org/llama:Q4_XS", "Q4_XS matches none of its GGUF files"),
        ("org/llama/other.gguf", "other.gguf matches none of its GGUF files; .* tiny-q4_k_m.gguf$"),
        ("org/llama", "without a format, the name matches 6 GGUF files; name one as "),
        ("org/other:Q8_0", "cannot fetch org/other: no such model on the Hub"),
    ],
)
def test_name_that_is_not_one_gguf_file_is_answered_with_those_of_the_repository(
    model: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=message) as refusal:
        find(model, tmp_path)
    assert "mmproj" not in str(refusal.value) and "00002-of" not in str(refusal.value)


@pytest.mark.usefixtures("hub")
def test_repository_with_one_gguf_file_needs_no_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHub, "files", {"config.json": b"{}", "tiny-Q8_0.gguf": b"x"})
    assert find("org/llama", tmp_path).path.name == "tiny-Q8_0.gguf"


@pytest.mark.usefixtures("hub")
def test_gguf_file_of_the_hub_that_lacks_a_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHub, "files", {"a-Q8_0-00001-of-00002.gguf": b"x"})
    with pytest.raises(StartupError, match="the repository has no a-Q8_0-00002-of-00002.gguf"):
        find("org/llama:Q8_0", tmp_path)


@pytest.mark.usefixtures("hub")
def test_adapter_of_the_hub_is_found_with_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": str(GOLDEN / "llama")}
    files = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": b"x"}
    monkeypatch.setattr(FakeHub, "files", files)
    for flags in (["org/llama"], ["--model", str(GOLDEN / "llama"), "--adapter", "org/llama"]):
        settings = parse_settings([*flags, "--cache-dir", str(tmp_path)], {})
        check_source(settings)
        found = find_source(settings, print)
        assert found.path == GOLDEN / "llama" and found.adapter is not None
        assert {path.name for path in found.adapter.iterdir()} == {*files}


def test_file_that_a_folder_here_lacks_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        check_model("models/llama/missing.gguf")


def test_store_keeps_a_gguf_file_in_the_folder_of_its_repository() -> None:
    assert stored_name("org/name", "gs://b") == "gs://b/org-name"
    assert stored_name("org/name/x.gguf", "gs://b") == "gs://b/org-name/x.gguf"
