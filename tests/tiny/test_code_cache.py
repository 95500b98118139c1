"""Code that an earlier start compiled is found again, if it is intact and made from the same things."""

from __future__ import annotations

import ast
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from levserve.device.compile_events import listen
from levserve.device.platform import MIN_COMPILE_SECONDS, open_device
from levserve.device.program_cache import find_program, keep_program
from levserve.device.program_set import identify
from levserve.device.programs import Programs
from levserve.jit import code_cache, xla_call
from levserve.jit.code_cache import UNUSED_SECONDS, CodeCache, open_folder
from levserve.jit.target import detect_target
from levserve.jit.xla_call import Kernel
from levserve.model.cpu.linear import kernel_for, multiply
from levserve.model.cpu.products import product_for
from levserve.observe.metrics import Metrics
from levserve.settings.parse import parse_settings
from tests.conftest import GOLDEN
from tests.engines import ask, read, running_engine


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of the code cache during a test; jax's own folder of programs is another."""
    before = code_cache.current
    code_cache.use_cache(CodeCache(tmp_path))
    yield tmp_path
    code_cache.use_cache(before)


def test_what_was_kept_is_found_under_its_name_alone(tmp_path: Path) -> None:
    kept = CodeCache(tmp_path)
    kept.keep("one", b"code")
    assert (kept.find("one"), kept.find("other")) == (b"code", None)
    kept.keep("one", b"newer")
    assert kept.find("one") == b"newer" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("data", [b"", b"rubbish", b"\x7fELF" + bytes(200)])
def test_what_was_spoilt_is_not_found(data: bytes, tmp_path: Path) -> None:
    CodeCache(tmp_path).keep("one", b"code")
    (tmp_path / "one").write_bytes(data)
    assert CodeCache(tmp_path).find("one") is None


def test_who_cannot_write_does_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = CodeCache(tmp_path / "absent")
    kept.keep("one", b"code")
    assert kept.find("one") is None and "cannot keep compiled code" in caplog.text


def test_a_folder_is_of_one_version_of_the_sources_the_packages_the_cpu_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path / "folders"
    first = open_folder(folders, cpu="this one")
    assert open_folder(folders, cpu="this one") == first
    open_folder(folders, cpu="another")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    open_folder(folders, cpu="this one")
    (tmp_path / "site" / "jaxlib-99.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    open_folder(folders, cpu="this one")
    monkeypatch.setattr(code_cache, "OUR_SOURCES", tmp_path)
    (tmp_path / "model").mkdir()
    for number in range(2):
        (tmp_path / "model" / "source.py").write_text(f"x = {number}\n")
        code_cache._read_once.cache_clear()  # as in another process
        open_folder(folders, cpu="this one")
    assert len(list(folders.iterdir())) == 6, "each change made another"


@pytest.mark.parametrize(
    ("changed", "is_another"),
    [
        ("model/decoder.py", True),
        ("model/cpu/layers.py", True),
        ("jit/builder.py", True),
        ("device/rounds.py", True),
        ("device/loop.py", False),
        ("web/app.py", False),
        ("server.py", False),
        ("jaxlib-99.dist-info/METADATA", True),
        ("numpy-99.dist-info/METADATA", True),
        ("flask-99.dist-info/METADATA", False),
    ],
)
def test_only_a_change_to_what_compiles_makes_another_folder(
    changed: str, is_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "levserve"
    shutil.copytree(code_cache.OUR_SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_cache, "OUR_SOURCES", package)
    monkeypatch.syspath_prepend(package)
    before = open_folder(tmp_path / "folders", cpu="")
    path = package / changed
    assert path.exists() or path.parent.name.endswith(".dist-info")
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("# changed\n")
    code_cache._read_once.cache_clear()  # as in another process
    assert (open_folder(tmp_path / "folders", cpu="") != before) == is_another


def test_every_file_that_a_program_is_traced_from_counts() -> None:
    """The files of rounds import them, directly or not. `schedule` is left out: programs see only what the
    host has packed of requests."""
    package = code_cache.OUR_SOURCES
    counted = {path for pattern in code_cache.COMPILED for path in package.glob(pattern)}
    traced: set[Path] = set()
    todo = [package / "device" / name for name in ("rounds.py", "draft_rounds.py", "text_rounds.py")]
    while todo:
        path = todo.pop()
        if path not in traced and path.is_relative_to(package) and path.parent.name != "schedule":
            traced.add(path)
            todo += our_imports(path)
    assert len(traced) > 10 and traced <= counted


def our_imports(path: Path) -> list[Path]:
    files = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("levserve."):
            place = code_cache.OUR_SOURCES.parent.joinpath(*(node.module or "").split("."))
            if place.is_dir():
                files += [place / f"{alias.name}.py" for alias in node.names]
            else:
                files.append(place.with_suffix(".py"))
    return files


def test_a_folder_that_no_start_has_used_for_a_month_goes(tmp_path: Path) -> None:
    ages = {"old": UNUSED_SECONDS + 60, "recent": UNUSED_SECONDS - 3600}
    for name, age in ages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "code").write_bytes(b"")
        os.utime(tmp_path / name, times=(0, time.time() - age))
    folder = open_folder(tmp_path, cpu="")
    assert set(tmp_path.iterdir()) == {folder, tmp_path / "recent"}


WEIGHT = np.arange(64 * 32, dtype=np.float32).reshape(64, 32).astype(jnp.bfloat16)
X = np.eye(3, 32, dtype=np.float32)


def kernel_named(name: str) -> Kernel:
    """A kernel that multiplies."""
    return dataclasses.replace(kernel_for(product_for(WEIGHT.dtype, 32, detect_target())), name=name)


def check_kernel(name: str) -> None:
    """Registers a kernel that multiplies, and checks its product."""
    called = xla_call.register(kernel_named(name))
    product = jax.ffi.ffi_call(called, jax.ShapeDtypeStruct((3, 64), jnp.float32))(
        X, np.array([3], np.int32), WEIGHT
    )
    np.testing.assert_array_equal(product, X @ WEIGHT.astype(np.float32).T)


def test_a_kernel_is_compiled_once_and_then_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernel("levserve_first")
    (kept,) = folder.iterdir()
    (folder / kernel_named("levserve_second").call_name).write_bytes(kept.read_bytes())
    monkeypatch.setattr(xla_call, "compile_kernel", None)
    check_kernel("levserve_second")
    with pytest.raises(TypeError):
        check_kernel("levserve_third")


@pytest.mark.parametrize("data", [b"", b"rubbish", b"\x7fELF" + bytes(200)])
def test_a_kernel_that_was_kept_and_spoilt_is_compiled_anew(data: bytes, folder: Path) -> None:
    name = f"levserve_spoilt_{len(data)}"
    kept = folder / kernel_named(name).call_name
    kept.write_bytes(data)
    check_kernel(name)
    assert kept.read_bytes() != data


def test_who_cannot_keep_a_kernel_does_without(folder: Path) -> None:
    code_cache.use_cache(CodeCache(folder / "absent"))
    check_kernel("levserve_not_kept")
    assert not list(folder.iterdir())


def test_a_program_that_cannot_be_saved_runs_all_the_same_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    lowered = jax.jit(lambda x: jax.pure_callback(lambda given: np.asarray(given) + 1, shape, x)).lower(shape)
    keep_program("callback", lowered, lowered.compile())
    assert not list(folder.iterdir()) and "every start compiles it" in caplog.text


def test_a_program_comes_back_with_the_kernel_it_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, target = jax.devices("cpu")[0], detect_target()
    kernel = kernel_for(product_for(jnp.dtype(jnp.bfloat16), 80, target)).call_name
    rng = np.random.default_rng(0)
    weight, x = (
        rng.standard_normal((64, 80)).astype(jnp.bfloat16),
        rng.standard_normal((5, 80)).astype(np.float32),
    )
    monkeypatch.setattr(xla_call, "_registered", set[str]())  # as in a new process
    lowered = jax.jit(lambda weight, x: (multiply(weight, None, x, target=target) + 1,)).lower(weight, x)
    compiled = lowered.compile()
    keep_program("sum", lowered, compiled)
    assert {path.name for path in folder.iterdir()} == {"sum", kernel}

    monkeypatch.setattr(xla_call, "compile_kernel", None)  # compiling anything would fail from here on
    found = find_program("sum", [device])
    assert found is not None
    np.testing.assert_array_equal(found(weight, x)[0], compiled(weight, x)[0])

    xla_call._registered.clear()
    (folder / kernel).unlink()
    assert find_program("sum", [device]) is None, "without its kernel it is of no use"
    np.testing.assert_array_equal(compiled(weight, x)[0], found(weight, x)[0])  # a loaded program still works
    assert find_program("another", [device]) is None


def test_what_jax_has_loaded_from_disk_does_not_count_as_compiled(folder: Path) -> None:
    """XLA serializes such a program without its code, so it must not be kept: neither when jax loads it,
    nor when jax has it in memory from then on."""
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    shape = jax.ShapeDtypeStruct((7, 11), jnp.float32)
    compiles = listen(Metrics())

    def count(program: jax.stages.Wrapped) -> int:
        num_compiled = compiles.num_compiled_here
        program.lower(shape).compile()
        return compiles.num_compiled_here - num_compiled

    def make_program() -> jax.stages.Wrapped:
        def add(x: jax.Array) -> jax.Array:
            return jnp.cumsum(x, 0) + 1

        return jax.jit(add)

    try:
        for name, value in options.items():
            jax.config.update(name, value)
        reset_cache()
        assert count(make_program()) == 1
        again = make_program()
        assert count(again) == 0, "jax found it on disk"
        assert count(again) == 0, "jax has it in memory"
    finally:
        compiles.stop()
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (60.0, 60.0)])
def test_jax_keeps_small_programs_too_unless_it_was_told_which(
    before: float, after: float, folder: Path
) -> None:
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_entry_size_bytes", MIN_COMPILE_SECONDS
    options = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update(MIN_COMPILE_SECONDS, before)
        open_device(parse_settings(["--cache-dir", str(folder)], {}))
        assert getattr(jax.config, MIN_COMPILE_SECONDS) == after
    finally:
        for name, value in options.items():
            jax.config.update(name, value)


def test_a_program_that_cannot_be_read_back_is_compiled_anew(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CodeCache(folder).keep("sum", b"not a program, but kept as it was")
    assert find_program("sum", jax.devices("cpu")[:1]) is None
    assert "is compiled again" in caplog.text


def test_a_second_start_traces_nothing_and_says_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--cache-dir", str(folder), "--prefill-chunk", "12"  # a size that no other test has compiled

    def answer() -> list[int]:
        with running_engine(GOLDEN / "llama", *flags, rows=2, compiles_all=True) as running:
            running.wait_compiled()
            (answer,) = read(running.submit(ask([1, 2, 3], 20)))
            assert running.metric("compile_cache_misses_total") == 0 or not is_second
            return list(answer.tokens)

    is_second = False
    first = answer()
    is_second = True
    monkeypatch.setattr(Programs, "lower", None)
    assert answer() == first


@dataclasses.dataclass
class Client:
    platform_version: str = "one"


@dataclasses.dataclass
class Device:
    process_index: int
    id: int
    device_kind: str = "cpu"
    client: Client = dataclasses.field(default_factory=Client)


def test_a_program_of_several_devices_is_for_these_devices_of_these_hosts() -> None:
    of_one_host = [Device(0, 0), Device(0, 1)]
    of_two_hosts = [Device(0, 0), Device(1, 131072)]
    assert identify([Device(0, 0)]) == identify([Device(1, 5)])  # type: ignore[list-item]
    assert identify(of_one_host) != identify(of_two_hosts)  # type: ignore[arg-type]
    assert identify(of_one_host) == identify([Device(0, 0), Device(0, 1)])  # type: ignore[arg-type,list-item]
