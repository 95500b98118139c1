"""Weights that an earlier start prepared are mapped, are the same, and never stop a start."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from levserve.api.model import Model
from levserve.errors import StartupError
from levserve.jit import code_cache
from levserve.models.describe import Description, describe
from levserve.settings.parse import parse_settings
from levserve.settings.settings import Settings
from levserve.weights import prepared
from levserve.weights.array_file import DamagedFile, is_whole, map_arrays, write_arrays
from levserve.weights.model_files import ModelFiles
from tests.conftest import GOLDEN
from tests.engines import running_engine
from tests.tiny.test_code_cache import our_imports
from tests.tiny.test_gguf_kept import quantized_file

ARRAYS = {
    "bits": np.arange(1001, dtype=np.uint8),
    "numbers": np.linspace(-1, 1, 96, dtype=np.float32).reshape(8, 12),
    "short": np.linspace(-1, 1, 7).astype(ml_dtypes.bfloat16),
    "eight": np.linspace(-1, 1, 64).astype(ml_dtypes.float8_e4m3fn),
    "none": np.empty((0, 4), np.int8),
}

FOR_SERVING = (
    "errors.py",
    "jit/code_cache.py",
    "model/attention.py",
    "model/backend.py",
    "model/experts.py",
    "model/fp8_rows.py",
    "model/placement.py",
    "model/rotary.py",
    "model/search.py",
    "model/text_attention.py",
    "model/traits.py",
    "model/xla.py",
    "observe/control_group.py",
    "settings/credentials.py",
    "settings/settings.py",
)
"""Sources that reading and quantizing import and that decide no number of theirs."""


@pytest.fixture
def keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps small models too, whatever disk the tests run on."""
    monkeypatch.setattr(prepared, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(prepared, "FREE_SHARE", 0.0)
    monkeypatch.setattr(prepared, "IN_MEMORY", ())


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often a model was read from its own files, by its folder."""
    counts: Counter[str] = Counter()
    from levserve.weights import checkpoint

    read = checkpoint.read_arrays

    def count(path, *rest, **named):  # type: ignore[no-untyped-def]
        counts[path.name] += 1
        return read(path, *rest, **named)

    monkeypatch.setattr(checkpoint, "read_arrays", count)
    return counts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "llama", tmp_path / "llama"))


def described(model: Path, cache: Path, *flags: str) -> Description:
    flags = ("--model", str(model), "--device", "cpu", "--cache-dir", str(cache), *flags)
    return describe(parse_settings(list(flags), {}), ModelFiles(model.name, model))


def load(model: Path, cache: Path, *flags: str) -> dict[str, jax.Array]:
    return described(model, cache, *(flags or ("--quantize", "int8"))).load_arrays(lambda _: None)


def kept_files(cache: Path) -> list[Path]:
    return sorted((cache / "weights").glob("*/weights"))


def assert_same(arrays: dict[str, jax.Array], others: dict[str, jax.Array]) -> None:
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert (array.dtype, array.shape) == (others[name].dtype, others[name].shape)
        assert np.asarray(array).tobytes() == np.asarray(others[name]).tobytes(), name


def are_in_file(arrays: dict[str, jax.Array], file: Path) -> list[bool]:
    """Whether each array lies in the pages of a mapped file."""
    pages = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f" {file.resolve()}"):
            addresses, _ = line.split(maxsplit=1)
            start, end = (int(address, 16) for address in addresses.split("-"))
            pages.append(range(start, end))
    places = (array.unsafe_buffer_pointer() for array in arrays.values())
    return [any(place in page for page in pages) for place in places]


def test_arrays_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    size = write_arrays(tmp_path / "x", ARRAYS.items())
    assert size == (tmp_path / "x").stat().st_size and is_whole(tmp_path / "x")
    mapped = map_arrays(tmp_path / "x", 2)
    assert list(mapped) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (mapped[name].dtype, mapped[name].shape) == (array.dtype, array.shape)
        assert mapped[name].tobytes() == array.tobytes() and not mapped[name].flags.writeable
        assert mapped[name].ctypes.data % 64 == 0 or not array.size


def test_a_file_that_is_not_whole_is_seen_without_reading_arrays(tmp_path: Path) -> None:
    write_arrays(tmp_path / "x", ARRAYS.items())
    whole = (tmp_path / "x").read_bytes()
    changed = bytearray(whole)
    changed[-100] ^= 1  # in the index
    for data in (b"", whole[:-1], whole[: len(whole) // 2], whole + b"\0", bytes(len(whole)), bytes(changed)):
        (tmp_path / "y").write_bytes(data)
        assert not is_whole(tmp_path / "y")
    assert not is_whole(tmp_path / "absent")


@pytest.mark.parametrize("place", [0, 500, 1000, 1030])
def test_a_changed_number_is_found(place: int, tmp_path: Path) -> None:
    write_arrays(tmp_path / "x", ARRAYS.items())
    data = bytearray((tmp_path / "x").read_bytes())
    data[place] ^= 4
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DamagedFile, match="checksum mismatch"):
        map_arrays(tmp_path / "x", 2)


def test_who_holds_a_file_is_told_when_its_last_array_is_gone(tmp_path: Path) -> None:
    write_arrays(tmp_path / "x", ARRAYS.items())
    gone = threading.Event()
    mapped = map_arrays(tmp_path / "x", 2, on_unmap=gone.set)
    held = jax.device_put(mapped.pop("numbers"))
    mapped.clear()
    assert not gone.is_set()
    held.delete()
    gc.collect()  # as when a model is unloaded: jax releases the memory when Python collects garbage
    assert gone.is_set()


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", "--quantize int8"),
        ("llama", "--quantize int8-blocks"),
        ("llama", "--quantize int8 --kernels xla"),
        ("qwen2", "--quantize int8 --dtype float32"),
        ("llama", "--quantize none"),
        ("qwen2", "--quantize none --kernels xla --dtype float32"),
        ("mixtral", "--quantize none"),
    ],
)
def test_the_second_start_maps_what_the_first_one_made(
    family: str, flags: str, tmp_path: Path, keeps_all: None, conversions: Counter[str]
) -> None:
    options = flags.split()
    plain = load(GOLDEN / family, tmp_path, *options, "--weight-cache", "0")
    assert not (tmp_path / "weights").exists()
    first = load(GOLDEN / family, tmp_path, *options)
    second = load(GOLDEN / family, tmp_path, *options)
    assert conversions == {family: 2}
    (file,) = kept_files(tmp_path)
    for arrays in (first, second):
        assert_same(arrays, plain)
        assert all(are_in_file(arrays, file))
    assert not any(are_in_file(plain, file))


def test_four_bits_are_mapped_as_well(tmp_path: Path, keeps_all: None) -> None:
    path = quantized_file(tmp_path, {"0.ffn_down.weight": Kind.Q8_0}, Kind.Q4_0)
    plain = load(path, tmp_path, "--quantize", "int4-blocks", "--weight-cache", "0")
    for _ in range(2):
        arrays = load(path, tmp_path, "--quantize", "int4-blocks")
        assert_same(arrays, plain)
        (file,) = kept_files(tmp_path)
        assert all(are_in_file(arrays, file))
    assert arrays["layers.0.down"].size == 2 * arrays["layers.1.down"].size


def test_the_memory_that_quantized_weights_take_is_known_before(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "gemma2", "gpt2"):
        for quantize in ("int8", "int8-blocks"):
            description = described(GOLDEN / family, tmp_path, "--quantize", quantize)
            arrays = description.load_arrays(lambda _: None)
            assert description.expected_weight_bytes == sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("quantize", ["int8", "none"])
def test_only_a_cpu_that_has_the_whole_model_keeps_its_weights(
    quantize: str, tmp_path: Path, keeps_all: None
) -> None:
    whole = described(GOLDEN / "llama", tmp_path, "--quantize", quantize)
    assert whole._prepared() is not None
    gpu = cast(jax.Device, SimpleNamespace(platform="gpu"))
    assert replace(whole, device=gpu)._prepared() is None
    shared = described(GOLDEN / "llama", tmp_path, "--quantize", quantize, "--tensor-parallel", "2")
    assert shared.mesh is not None and shared._prepared() is None


def test_small_models_are_not_kept(tmp_path: Path) -> None:
    load(GOLDEN / "llama", tmp_path)
    assert not (tmp_path / "weights").exists()


def test_every_other_quantization_type_and_source_has_a_file_of_its_own(
    model: Path, tmp_path: Path, keeps_all: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in (
        ("--quantize", "int8"),
        ("--quantize", "int8-blocks"),
        ("--quantize", "int8", "--dtype", "float32"),
        ("--quantize", "none"),
        ("--quantize", "none", "--dtype", "float32"),
    ):
        load(model, tmp_path, *flags)
    assert len(kept_files(tmp_path)) == 5
    monkeypatch.setattr(prepared, "read_sources", lambda patterns: b"a later version")
    load(model, tmp_path)
    assert len(kept_files(tmp_path)) == 6


def test_every_source_that_may_change_prepared_numbers_counts() -> None:
    """They are all that reading and quantizing import, directly or not, except what only serves."""
    package = code_cache.OUR_SOURCES
    counted = {path for pattern in prepared.SOURCES for path in package.glob(pattern)}
    for_serving = {package / name for name in FOR_SERVING}
    todo = [package / name for name in ("weights/checkpoint.py", "model/balance.py", "model/quantize.py")]
    found: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in found | for_serving and path.is_relative_to(package):
            found.add(path)
            todo += our_imports(path)
    assert len(found) > 30 and found <= counted
    assert not for_serving & counted and all(path.is_file() for path in for_serving)


def test_a_model_that_changed_is_prepared_again(model: Path, tmp_path: Path, keeps_all: None) -> None:
    before = load(model, tmp_path)
    (weights,) = model.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1  # the file's size and its first part stay the same
    weights.write_bytes(data)
    after = load(model, tmp_path)
    assert len(kept_files(tmp_path)) == 2
    assert_same(after, load(model, tmp_path, "--quantize", "int8", "--weight-cache", "0"))
    assert any(np.asarray(after[name]).tobytes() != np.asarray(before[name]).tobytes() for name in after)


def test_a_touched_model_is_prepared_again(model: Path, tmp_path: Path, keeps_all: None) -> None:
    load(model, tmp_path)
    (weights,) = model.glob("*.safetensors")
    os.utime(weights, ns=(1, 1))
    load(model, tmp_path)
    assert len(kept_files(tmp_path)) == 2


def test_a_model_that_changes_while_it_is_read_is_not_kept(
    model: Path, tmp_path: Path, keeps_all: None, caplog: pytest.LogCaptureFixture
) -> None:
    description = described(model, tmp_path, "--quantize", "int8")
    cache = description._prepared()
    assert cache is not None
    os.utime(next(model.glob("*.safetensors")), ns=(1, 1))
    arrays = dict(cache.read(lambda: iter(ARRAYS.items()), lambda _: None))
    assert list(arrays) == list(ARRAYS) and not kept_files(tmp_path)
    assert "changed while it was read" in caplog.text


@pytest.mark.parametrize("damage", ["changed", "truncated", "empty", "removed"])
def test_a_spoilt_file_is_written_again(
    damage: str, tmp_path: Path, keeps_all: None, conversions: Counter[str]
) -> None:
    plain = load(GOLDEN / "llama", tmp_path, "--quantize", "int8", "--weight-cache", "0")
    load(GOLDEN / "llama", tmp_path)
    (file,) = kept_files(tmp_path)
    data = bytearray(file.read_bytes())
    file.unlink()  # what other processes have mapped stays
    data[len(data) // 2] ^= 1
    spoilt = {"changed": bytes(data), "truncated": bytes(data[:-1]), "empty": b""}
    if damage in spoilt:
        file.write_bytes(spoilt[damage])
    assert_same(load(GOLDEN / "llama", tmp_path), plain)
    assert_same(load(GOLDEN / "llama", tmp_path), plain)
    assert conversions == {"llama": 3} and len(kept_files(tmp_path)) == 1


def test_a_spoilt_file_is_replaced_while_another_start_uses_it(tmp_path: Path, keeps_all: None) -> None:
    first = load(GOLDEN / "llama", tmp_path)
    (file,) = kept_files(tmp_path)
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    (file.parent / "other").write_bytes(data)
    (file.parent / "other").replace(file)
    assert_same(load(GOLDEN / "llama", tmp_path), first)
    assert_same(load(GOLDEN / "llama", tmp_path), first)


def test_a_file_that_was_deleted_under_a_running_server_is_written_again(
    tmp_path: Path, keeps_all: None
) -> None:
    first = load(GOLDEN / "llama", tmp_path)
    (file,) = kept_files(tmp_path)
    file.unlink()
    assert_same(load(GOLDEN / "llama", tmp_path), first)
    assert kept_files(tmp_path) == [file]


def test_a_writer_that_was_killed_leaves_nothing_that_is_read(tmp_path: Path, keeps_all: None) -> None:
    plain = load(GOLDEN / "llama", tmp_path)
    (file,) = kept_files(tmp_path)
    file.unlink()
    file.with_name("weights.part").write_bytes(b"half of it")
    assert_same(load(GOLDEN / "llama", tmp_path), plain)
    assert not file.with_name("weights.part").exists() and is_whole(file)


def test_of_two_starts_at_once_one_prepares(
    tmp_path: Path, keeps_all: None, conversions: Counter[str]
) -> None:
    """Locks belong to open files, so threads can stand for processes."""
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(lambda _: load(GOLDEN / "llama", tmp_path), range(3))
    assert conversions == {"llama": 1}
    for other in others:
        assert_same(other, first)


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, keeps_all: None, conversions: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "weights").write_text("a file where the folder would be")
    plain = load(GOLDEN / "llama", tmp_path, "--quantize", "int8", "--weight-cache", "0")
    assert_same(load(GOLDEN / "llama", tmp_path), plain)
    assert conversions == {"llama": 2} and "are not kept" in caplog.text


def test_a_folder_that_can_only_be_read_is_used(
    tmp_path: Path, keeps_all: None, conversions: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the layer of an image. The tests may run as root, who can write everywhere."""
    first = load(GOLDEN / "llama", tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(prepared, "lease_folder", refuse)
    assert_same(load(GOLDEN / "llama", tmp_path), first)
    assert conversions == {"llama": 1}


def test_a_full_disk_costs_only_time(
    tmp_path: Path, keeps_all: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load(GOLDEN / "llama", tmp_path, "--quantize", "int8", "--weight-cache", "0")
    monkeypatch.setattr(prepared, "FREE_SHARE", 1.0)
    assert_same(load(GOLDEN / "llama", tmp_path), plain)
    assert "of the disk are free" in caplog.text

    def fill_up(path: Path, arrays: object) -> int:
        path.write_bytes(b"all that fitted")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepared, "FREE_SHARE", 0.0)
    monkeypatch.setattr(prepared, "write_arrays", fill_up)
    assert_same(load(GOLDEN / "llama", tmp_path), plain)
    assert "No space left" in caplog.text
    assert not list((tmp_path / "weights").glob("*/weights*"))


def test_files_in_memory_would_take_it_twice(
    tmp_path: Path, keeps_all: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prepared, "IN_MEMORY", (prepared._file_system(tmp_path),))
    load(GOLDEN / "llama", tmp_path)
    assert not kept_files(tmp_path) and "in-memory file system" in caplog.text
    assert prepared._file_system(Path("/proc")) == "proc"


def test_the_longest_unused_weights_make_room(tmp_path: Path, keeps_all: None) -> None:
    names = []
    for family in ("llama", "qwen2", "mistral"):
        load(GOLDEN / family, tmp_path)
        (new,) = {file.parent.name for file in kept_files(tmp_path)} - set(names)
        names.append(new)
        os.utime(tmp_path / "weights" / new / ".lock", (len(names), len(names)))
    used = sum(file.stat().st_blocks * 512 for file in kept_files(tmp_path))
    load(GOLDEN / "llama", tmp_path)  # used again, so the second one goes
    load(GOLDEN / "gemma2", tmp_path, "--quantize", "int8", "--weight-cache", str(used))
    left = {file.parent.name for file in kept_files(tmp_path)}
    assert names[1] not in left and names[0] in left and len(left) >= 2


def test_weights_in_use_are_not_removed_and_too_small_a_limit_costs_only_time(
    tmp_path: Path, keeps_all: None, caplog: pytest.LogCaptureFixture
) -> None:
    held = load(GOLDEN / "llama", tmp_path)
    plain = load(GOLDEN / "qwen2", tmp_path, "--quantize", "int8", "--weight-cache", "0")
    assert_same(load(GOLDEN / "qwen2", tmp_path, "--quantize", "int8", "--weight-cache", "1"), plain)
    (file,) = kept_files(tmp_path)
    assert all(are_in_file(held, file))
    assert "--weight-cache allows" in caplog.text


def test_nothing_is_removed_for_a_model_that_cannot_fit(
    tmp_path: Path, keeps_all: None, caplog: pytest.LogCaptureFixture
) -> None:
    load(GOLDEN / "llama", tmp_path)
    gc.collect()  # so that it is not in use
    (file,) = kept_files(tmp_path)
    load(GOLDEN / "qwen2", tmp_path, "--quantize", "none", "--weight-cache", "1000")
    assert kept_files(tmp_path) == [file]
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "in use" not in caplog.text


def test_nothing_is_removed_if_the_disk_would_still_be_too_full(
    tmp_path: Path, keeps_all: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(GOLDEN / "llama", tmp_path)
    monkeypatch.setattr(prepared, "FREE_SHARE", 0.5)
    gc.collect()
    (file,) = kept_files(tmp_path)
    size = sum(each.stat().st_blocks * 512 for each in file.parent.iterdir())
    flags = ("--quantize", "int8", "--weight-cache", str(size + 100_000))
    for used, is_kept in ((20 * size, False), (size, True)):
        disk = shutil._ntuple_diskusage(total=20 * size, used=used, free=20 * size - used)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, disk=disk: disk)
        load(GOLDEN / "qwen2", tmp_path, *flags)
        gc.collect()
        assert (kept_files(tmp_path) == [file]) != is_kept
    assert caplog.text.count("of the disk are free") == 1


def test_a_model_that_cannot_be_read_is_refused_as_without_a_cache(
    model: Path, tmp_path: Path, keeps_all: None
) -> None:
    (weights,) = model.glob("*.safetensors")
    header = json.loads(weights.read_bytes()[8 : 8 + int.from_bytes(weights.read_bytes()[:8], "little")])
    start = min(entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__")
    data = bytearray(weights.read_bytes())
    first = (
        len(data)
        - max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        + start
    )
    data[first : first + 4096] = b"\xff" * 4096
    weights.write_bytes(data)
    with pytest.raises(StartupError, match="not finite"):
        load(model, tmp_path)
    assert not list((tmp_path / "weights").glob("*/weights*"))


def test_a_server_answers_the_same_from_mapped_weights_and_takes_others(
    tmp_path: Path, keeps_all: None
) -> None:
    """Weights that are swapped in later are not the file's, and do not change it."""
    flags = ("--quantize", "int8", "--cache-dir", str(tmp_path), "--page-size", "4", "--prefill-chunk", "16")
    stored = {
        name: array
        for file in (GOLDEN / "llama").glob("*.safetensors")
        for name, array in load_file(file).items()
    }
    others = {name: np.flip(array, 0) if "embed" in name else array for name, array in stored.items()}
    answers = []
    for options in (("--weight-cache", "0"), (), ()):
        with running_engine(GOLDEN / "llama", *flags, *options) as running:
            model = Model(running.registry, Settings())
            answers.append([greedy(model)])
            model.load_weights(others)
            answers[-1].append(greedy(model))
            running.registry.reload()
            answers[-1].append(greedy(model))
    plain, *mapped = answers
    assert mapped == [plain, plain]
    assert plain[0] == plain[2] != plain[1]
    (file,) = kept_files(tmp_path)
    assert is_whole(file)


def greedy(model: Model) -> list[int]:
    (result,) = model.generate([1, 2, 3, 4], max_tokens=16, temperature=0, ignore_eos=True)
    return list(result.tokens)
