"""Models in stores: what is fetched, kept, resumed, checked and cleared.

Real client libraries run against servers on loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from levserve.errors import ConfigError, StartupError
from levserve.models.catalogue import Catalogue
from levserve.settings.parse import parse_settings
from levserve.settings.settings import Settings
from levserve.weights import store
from levserve.weights.source import ModelFiles, check_model, check_source, find_source, stored_name
from tests.conftest import GOLDEN
from tests.stores import WebServer, amazon_store, google_store, upload, web_store

LLAMA = GOLDEN / "llama"
OWN_FILES = {".lock", ".address"}
"""What a folder of the cache has besides the model's files."""
SERVED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "golden.json"}


@pytest.fixture(scope="module")
def google() -> Iterator[Any]:
    with google_store() as files:
        upload(files, LLAMA, "models/names/org-llama")
        yield files


@pytest.fixture(scope="module")
def amazon() -> Iterator[Any]:
    with amazon_store() as files:
        upload(files, LLAMA, "models/llama")
        yield files


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    folder = tmp_path / "web"
    shutil.copytree(LLAMA, folder / "llama")
    with web_store(folder) as server:
        yield server


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.01)


def some_bytes(size: int) -> bytes:
    """Random bytes and a final dot: the emulated store would drop a line break at the end."""
    return os.urandom(size - 1) + b"."


class Cache:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: list[str] = []

    def find(self, model: str, **settings: Any) -> ModelFiles:
        return find_source(Settings(cache_dir=str(self.path), model=model, **settings), self.told.append)

    def find_run(self, checkpoint_path: str, **settings: Any) -> ModelFiles:
        return find_source(
            Settings(cache_dir=str(self.path), checkpoint_path=checkpoint_path, **settings), self.told.append
        )

    @property
    def folders(self) -> list[Path]:
        return sorted((self.path / "stores").glob("*"))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def same_files(one: Path, other: Path) -> bool:
    names = {path.name for path in one.iterdir()} - OWN_FILES
    return names == SERVED and all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_a_model_comes_from_google(google: Any, cache: Cache) -> None:
    files = cache.find("gs://models/names/org-llama")
    assert files.name == "org-llama" and same_files(files.path, LLAMA)
    assert cache.told and "fetching gs://models/names/org-llama (5 files" in cache.told[0]


def test_a_model_comes_from_amazon(amazon: Any, cache: Cache) -> None:
    files = cache.find("s3://models/llama/")
    assert files.name == "llama" and same_files(files.path, LLAMA)


def test_a_model_comes_from_a_web_server_with_listings_or_without(web: WebServer, cache: Cache) -> None:
    assert same_files(cache.find(f"{web.address}/llama").path, LLAMA)
    web.has_listings = False
    found = cache.find(f"{web.address}/llama").path
    assert {path.name for path in found.iterdir()} - OWN_FILES == SERVED - {"golden.json"}


def test_files_of_pytorch_come_from_a_store_that_has_no_safetensors(web: WebServer, cache: Cache) -> None:
    folder = web.folder / "old"
    folder.mkdir()
    shards = {f"pytorch_model-0000{number}-of-00002.bin": some_bytes(100) for number in (1, 2)}
    index = {"weight_map": {str(number): name for number, name in enumerate(shards)}}
    files = {**shards, "pytorch_model.bin.index.json": json.dumps(index).encode(), "config.json": b"{}"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "optimizer.bin").touch()
    for web.has_listings in (True, False):
        found = cache.find(f"{web.address}/old").path
        assert {path.name for path in found.iterdir()} - OWN_FILES == files.keys()
    (folder / "model.safetensors").write_bytes(b"newer")
    found = cache.find(f"{web.address}/old").path
    assert not list(found.glob("*.bin"))


def test_a_single_file_comes_from_a_web_server(web: WebServer, cache: Cache) -> None:
    content = some_bytes(300_000)
    (web.folder / "tiny.Q8_0.gguf").write_bytes(content)
    files = cache.find(f"{web.address}/tiny.Q8_0.gguf")
    assert files.name == "tiny.Q8_0" and files.path.read_bytes() == content


def test_a_brain_comes_from_a_store_with_the_tokenizer_in_its_folder(
    google: Any, web: WebServer, cache: Cache, tmp_path: Path
) -> None:
    brain = GOLDEN / "hrm-tiny-dense-pt"
    upload(google, brain, "models/brains/dense")
    shutil.copytree(brain, tmp_path / "web" / "brain")
    (tmp_path / "web" / "brain" / "brain.json").unlink()
    for address, name in (
        ("gs://models/brains/dense", "dense"),
        ("gs://models/brains/dense/actv1_student.pt", "dense"),
        (f"{web.address}/brain/actv1_student.pt", "brain"),
    ):
        found = cache.find(address)
        assert (found.name, found.path.name) == (name, "actv1_student.pt")
        assert found.path.read_bytes() == (brain / "actv1_student.pt").read_bytes()
        assert found.tokenizer == found.path.parent / "tokenizer"
        assert (found.tokenizer / "tokenizer.json").is_file()


def test_a_stored_brain_without_weights_is_told(google: Any, cache: Cache) -> None:
    google.pipe_file("models/brains/empty/brain.json", b'{"checkpoint_file": "D:\\\\new.pt"}')
    with pytest.raises(StartupError, match="none of new.pt, actv1_student.safetensors, actv1_student.pt"):
        cache.find("gs://models/brains/empty")


def test_names_with_slashes_are_kept_with_hyphens(google: Any, cache: Cache) -> None:
    files = cache.find("org/llama", model_store="gs://models/names/")
    assert files.name == "org/llama" and same_files(files.path, LLAMA)


def test_every_folder_of_a_store_is_a_model_that_may_be_asked_for(google: Any, cache: Cache) -> None:
    catalogue = Catalogue(
        parse_settings(["--models-dir", "gs://models/names", "--cache-dir", str(cache.path)], {})
    )
    assert catalogue.names() == ["org-llama"]
    settings = catalogue.find("org-llama")
    assert settings is not None
    files = find_source(settings, lambda _: None)
    assert settings.served_model_name == ("org-llama",) and same_files(files.path, LLAMA)


def test_a_store_may_hold_files_beside_folders(google: Any, cache: Cache) -> None:
    upload(google, LLAMA, "models/mixed/folder")
    google.pipe_file("models/mixed/tiny.Q8_0.gguf", b"a file")
    google.pipe_file("models/mixed/README.md", b"no model")
    catalogue = Catalogue(
        parse_settings(["--models-dir", "gs://models/mixed/", "--cache-dir", str(cache.path)], {})
    )
    assert catalogue.names() == ["folder", "tiny.Q8_0"]
    settings = catalogue.find("tiny.Q8_0")
    assert settings is not None and settings.main_name == "tiny.Q8_0"
    assert find_source(settings, lambda _: None).path.read_bytes() == b"a file"


def test_a_store_may_be_a_folder_and_does_not_hide_paths(tmp_path: Path, cache: Cache) -> None:
    shutil.copytree(LLAMA, tmp_path / "org-llama")
    assert cache.find("org/llama", model_store=str(tmp_path)).path == tmp_path / "org-llama"
    assert stored_name(str(LLAMA), "gs://bucket") == str(LLAMA)
    assert stored_name("s3://other/model", "gs://bucket") == "s3://other/model"
    with pytest.raises(ConfigError, match="org-missing' does not exist"):
        check_source(Settings(model="org/missing", model_store=str(tmp_path)))


def test_addresses_that_cannot_be_read_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        ConfigError, match="ftp:// is not supported; supported are gs://, s3://, http://, https://"
    ):
        check_model("ftp://host/model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs gcsfs; pip install 'levserve\[gcs\]'"):
        check_source(Settings(checkpoint_path="gs://bucket/run"))


@pytest.mark.parametrize("others", [["--model", "x"], ["--hf-checkpoint", "x"]])
def test_a_checkpoint_and_a_model_exclude_each_other(
    others: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--checkpoint-path", "run", *others], {})
    assert "exclude each other; give only one of them" in capsys.readouterr().err


def test_a_second_start_fetches_nothing(web: WebServer, cache: Cache) -> None:
    first = cache.find(f"{web.address}/llama")
    num_asked, num_told = len(web.asked), len(cache.told)
    second = cache.find(f"{web.address}/llama")
    assert (second.path, len(web.asked), len(cache.told)) == (first.path, num_asked, num_told)


def test_a_model_that_changed_in_its_store_is_fetched_to_a_folder_of_its_own(
    amazon: Any, cache: Cache
) -> None:
    upload(amazon, LLAMA, "models/changing")
    first = cache.find("s3://models/changing").path
    amazon.pipe_file("models/changing/config.json", b'{"changed": true}')
    second = cache.find("s3://models/changing").path
    assert (first / "config.json").read_bytes() == (LLAMA / "config.json").read_bytes()
    assert (second / "config.json").read_bytes() == b'{"changed": true}'


@pytest.mark.usefixtures("small_blocks")
def test_an_interrupted_download_goes_on_where_it_was(web: WebServer, cache: Cache) -> None:
    content = some_bytes(40 << 16)
    (web.folder / "big.gguf").write_bytes(content)
    web.fails_after = 10
    with pytest.raises(StartupError, match=r"cannot fetch http://.*/big.gguf.*what has arrived is kept"):
        cache.find(f"{web.address}/big.gguf")
    (folder,) = cache.folders
    assert not (folder / "big.gguf").exists()
    kept = (folder / "big.gguf.part.blocks").read_text().split()
    assert len(kept) == 10
    web.fails_after, web.asked = None, []
    assert cache.find(f"{web.address}/big.gguf").path.read_bytes() == content
    assert len(web.asked) == 30


@pytest.mark.usefixtures("small_blocks")
def test_a_failure_that_passes_is_tried_again(
    web: WebServer, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = some_bytes(3 << 16)
    (web.folder / "big.gguf").write_bytes(content)
    web.fails_after = 0
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(web, "fails_after", None))
    assert cache.find(f"{web.address}/big.gguf").path.read_bytes() == content


@pytest.mark.usefixtures("small_blocks")
def test_blocks_are_read_side_by_side(web: WebServer, cache: Cache) -> None:
    (web.folder / "big.gguf").write_bytes(some_bytes(8 << 16))
    web.gate = threading.Barrier(4)  # opens only when four readers are there
    cache.find(f"{web.address}/big.gguf")


@pytest.mark.usefixtures("small_blocks")
def test_a_web_server_without_ranges_sends_a_large_file_whole(web: WebServer, cache: Cache) -> None:
    content = some_bytes(3 << 16)
    (web.folder / "big.gguf").write_bytes(content)
    web.has_ranges = False
    assert cache.find(f"{web.address}/big.gguf").path.read_bytes() == content


@pytest.mark.usefixtures("small_blocks")
def test_a_web_server_that_refuses_urllib_sends_a_large_file_whole(web: WebServer, cache: Cache) -> None:
    content = some_bytes(3 << 16)
    (web.folder / "big.gguf").write_bytes(content)
    web.serves_urllib = False
    assert cache.find(f"{web.address}/big.gguf").path.read_bytes() == content


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_file_whose_checksum_is_wrong_is_thrown_away(
    google: Any, amazon: Any, cache: Cache, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"gs": google, "s3": amazon}[scheme]
    content = some_bytes(100_000)
    files.pipe_file("models/sum.gguf", content)
    read_range = store.Store.read_range

    def read_wrong(self: Any, *args: Any) -> bytes:
        data = bytearray(read_range(self, *args))
        data[1000] ^= 1
        return bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(store.Store, "read_range", read_wrong)
        with pytest.raises(
            StartupError,
            match=r"sum.gguf: its md5 is [0-9a-f]{32}, expected [0-9a-f]{32}; the copy was deleted",
        ):
            cache.find(f"{scheme}://models/sum.gguf")
    assert not [path for folder in cache.folders for path in folder.glob("sum.gguf*")]
    assert cache.find(f"{scheme}://models/sum.gguf").path.read_bytes() == content


def test_googles_other_checksum_is_checked_where_there_is_no_md5(
    google: Any, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    google.pipe_file("models/composed.gguf", b"in several parts")
    monkeypatch.setattr(store, "_md5", lambda info, etag: None)
    assert cache.find("gs://models/composed.gguf").path.read_bytes() == b"in several parts"
    google.pipe_file("models/composed.gguf", b"in other parts")
    monkeypatch.setattr(store.Store, "read_range", lambda self, file, start, stop: b"x" * (stop - start))
    with pytest.raises(StartupError, match="its crc32c is .*, expected "):
        cache.find("gs://models/composed.gguf")


def test_an_object_in_parts_on_amazon_has_no_md5_to_check(amazon: Any, cache: Cache) -> None:
    content = some_bytes(6 << 20)
    with amazon.open("models/parts.gguf", "wb", block_size=5 << 20) as file:
        file.write(content)
    assert "-" in amazon.info("models/parts.gguf")["ETag"]
    assert cache.find("s3://models/parts.gguf").path.read_bytes() == content


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (
            "gs://models/none",
            "model gs://models/none: expected config.json and *.safetensors or pytorch_model*.bin, found nothing",
        ),
        ("gs://models/none.gguf", "model gs://models/none.gguf does not exist"),
        (
            "gs://models/broken",
            "expected config.json and *.safetensors or pytorch_model*.bin, found config.json",
        ),
    ],
)
def test_what_is_not_in_the_store_is_told(google: Any, cache: Cache, address: str, told: str) -> None:
    google.pipe_file("models/broken/config.json", b"{}")
    google.pipe_file("models/broken/training_args.bin", b"")
    with pytest.raises(StartupError) as refusal:
        cache.find(address)
    assert told in str(refusal.value)


def test_a_store_that_does_not_answer_is_one_line(cache: Cache) -> None:
    for name in ("llama", "llama.gguf"):
        with pytest.raises(StartupError) as refusal:
            cache.find(f"http://127.0.0.1:9/{name}")
        assert str(refusal.value).startswith(f"cannot fetch http://127.0.0.1:9/{name}") and "\n" not in str(
            refusal.value
        )


def gguf_files(web: WebServer, *names: str) -> list[str]:
    for name in names:
        (web.folder / f"{name}.gguf").write_bytes(some_bytes(1_000_000))
    return [f"{web.address}/{name}.gguf" for name in names]


def test_the_least_recently_used_is_cleared_for_a_newcomer_but_never_what_is_served(
    web: WebServer, cache: Cache
) -> None:
    first, second, third = gguf_files(web, "first", "second", "third")
    limit = 2_500_000
    serving = cache.find(first, cache_size=limit)
    used = cache.find(second, cache_size=limit)
    assert used.lease is not None and serving.lease is not None
    used.lease.close()
    newest = cache.find(third, cache_size=limit)
    assert serving.path.exists() and newest.path.exists() and not used.path.exists()
    with pytest.raises(
        StartupError, match=r"needs 1\.0 MB in .*; --cache-size allows 2\.5 MB, and 2\.0 MB are in use"
    ):
        cache.find(second, cache_size=limit)
    serving.lease.close()
    assert cache.find(second, cache_size=limit).path.exists() and not serving.path.exists()


def test_use_makes_a_folder_young_again(web: WebServer, cache: Cache) -> None:
    addresses = gguf_files(web, "first", "second", "third")
    found = [cache.find(address) for address in addresses[:2]]
    for files, age in zip(found, (200, 100)):
        os.utime(files.path.parent / ".lock", (0, os.stat(files.path).st_mtime - age))
    again = cache.find(addresses[0])
    for files in (*found, again):
        assert files.lease is not None
        files.lease.close()
    cache.find(addresses[2], cache_size=2_500_000)
    assert found[0].path.exists() and not found[1].path.exists()


def test_a_model_larger_than_the_cache_is_refused_before_it_is_fetched(web: WebServer, cache: Cache) -> None:
    (address,) = gguf_files(web, "first")
    with pytest.raises(StartupError, match="--cache-size allows 0.5 MB"):
        cache.find(address, cache_size=500_000)
    assert not [path for folder in cache.folders for path in folder.glob("first*")]


@pytest.mark.usefixtures("small_blocks")
def test_two_starts_at_once_fetch_a_model_once(web: WebServer, cache: Cache) -> None:
    content = some_bytes(20 << 16)
    (web.folder / "big.gguf").write_bytes(content)
    found: list[ModelFiles] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.find(f"{web.address}/big.gguf"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [files.path.read_bytes() == content for files in found] == [True] * 4
    assert len(web.asked) == 20
