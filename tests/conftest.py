"""What every test gets: strict arithmetic, no leaked threads, and the models tests run on."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import find_browser
from tests.h200 import find_plugin
from tests.harness import find_harness
from tests.images import find_podman
from tests.kubectl import find_kubectl
from tests.mosaic import find_interpreter
from tests.nginx import find_nginx
from tests.node import NotAvailable, package_folder
from tests.units import find_analyzer

# Read by jax when a test first imports it, here and in the servers that tests start: a mix of types or ranks that jax
# would quietly widen is an error.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# The tiny models of this process take longer to compile than to run; servers that tests start compile as users' do. The last
# of these flags leaves the fusions as they are and has XLA's older emitters write their code, which saves a quarter of the time.
# Extra options that a release does not know are ignored.
QUICK_COMPILE = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
}
if version("jaxlib").startswith("0.10."):
    # These save a little more, but make other fusions. Later releases may not know them, and end the process that has such a flag.
    QUICK_COMPILE["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_prefer_vector_width=128"
# Models that several devices share are tested on a CPU that is divided into four; all others run on the first. Servers get
# the same flags, because what is compiled with other flags is kept in another folder.
FOUR_DEVICES = " --xla_force_host_platform_device_count=4"
QUICK_COMPILE["XLA_FLAGS"] += FOUR_DEVICES
os.environ.update(QUICK_COMPILE)

# Tracing leaves many objects behind that live on: at the usual threshold a tenth of the time goes to finding no garbage.
gc.set_threshold(50_000, 20, 10)

# How long an example takes says more about the machine than about the code. Every run draws others, so that the runs of a day make
# many. Tests that have found most have numbers of their own.
NO_CLOCK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", NO_CLOCK, max_examples=40)
settings.register_profile("thorough", NO_CLOCK, max_examples=1000)
settings.load_profile("quick")

CACHE_VARIABLE = "TESTS_CACHE_FOLDER"

# Compiled code outlives a test run: the next run compiles only what has changed. Entries are found by what they were made
# from, so removing the folder changes nothing but the time that tests take.
KEPT_FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "levserve-tests"
KEPT_SECONDS = 30 * 24 * 3600


def link_kept_folder(link: Path) -> None:
    """Makes the link lead to the folder of this name that is kept; a plain folder if none can be kept."""
    kept = KEPT_FOLDER / link.name
    with suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
        for entry in kept.iterdir():
            if entry.is_file() and entry.stat().st_mtime < time.time() - KEPT_SECONDS:
                entry.unlink()
    if os.access(kept, os.W_OK):
        link.symlink_to(kept)
    else:
        link.mkdir()


# Everything else that tests cache is in a folder of this run, which the first process of the run makes.
if CACHE_VARIABLE not in os.environ:
    os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="levserve-test-")
    atexit.register(shutil.rmtree, os.environ[CACHE_VARIABLE], ignore_errors=True)
    for name in ("programs", "kernels"):
        link_kept_folder(Path(os.environ[CACHE_VARIABLE], name))

# Where Python may not write bytecode beside its sources, every server that a test starts would compile jax anew: 6 s of a
# core instead of 2. Bytecode goes to the folder of this test run instead.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.path.join(os.environ[CACHE_VARIABLE], "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = (
    "llama",
    "llama3-rope",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi2",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "cohere",
    "mixtral",
    "qwen3-moe",
    "qwen2-moe",
    "glm4-moe",
    "deepseek3",
    "gpt-oss",
    "gpt2",
    "gpt-neox",
)

HEAVY = {
    "equinox",
    "gguf",
    "haliax",
    "huggingface_hub",
    "jax",
    "jaxlib",
    "llvmlite",
    "ml_dtypes",
    "numpy",
    "safetensors",
    "tensorstore",
    "torch",
    "transformers",
}
"""Not to be imported before the fork: jax must not be, and the others would make the server's first answer wait."""

LEFT_OUT = pytest.StashKey[list[str]]()
RINGS = ("pure", "tiny", "real")
"""The folders of tests, from the inside out: pure tests run first, those of a real server last.

Several workers run them the other way round, with `--no-loadscope-reorder`.
"""


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(ring_of(item))
    config.stash[LEFT_OUT] = []
    if not config.option.collectonly:
        for mark, find in (
            ("node", package_folder),
            ("nginx", find_nginx),
            ("browser", find_browser),
            ("systemd", find_analyzer),
            ("kubectl", find_kubectl),
            ("podman", find_podman),
            ("h200", find_plugin),
            ("l4", find_plugin),
            ("mosaic", find_interpreter),
            ("harness", find_harness),
        ):
            _leave_out(config, items, mark, find)
    # With several workers the longest come first, so that none of them works alone at the end.
    has_workers = hasattr(config, "workerinput")
    items.sort(key=lambda item: RINGS.index(ring_of(item)), reverse=has_workers)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was imported stays: garbage is looked for only among what tests make. A look at all takes a third of a second."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Pytest looks for garbage five times when it ends, and Python once more; the first look finds what was left behind."""
    gc.collect()
    gc.freeze()


def ring_of(item: pytest.Item) -> str:
    """The ring of a test is the folder that it sits in."""
    return _first_folder(item.path)


@functools.cache  # there are thousands of tests in less than two hundred files
def _first_folder(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0]


def _leave_out(config: pytest.Config, items: list[pytest.Item], mark: str, find: Callable[[], Path]) -> None:
    """Takes the tests out that need something which cannot be had here; and says so."""
    wanting = [item for item in items if item.get_closest_marker(mark)]
    if not wanting:
        return
    try:
        find()
    except NotAvailable as reason:
        items[:] = [item for item in items if item not in wanting]
        config.hook.pytest_deselected(items=wanting)
        config.stash[LEFT_OUT].append(f"{len(wanting)} deselected: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason in config.stash.get(LEFT_OUT, []):
        terminalreporter.write_line(reason)


@pytest.fixture(autouse=True)
def no_leaked_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every thread a test starts has ended when it ends; session-wide engines are older than the test."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while leaked := [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("levserve")
    ]:
        assert time.monotonic() < deadline, f"leaked threads: {leaked}"
        leaked[0].join(timeout=0.1)


@pytest.fixture(scope="session")
def bundled_gguf() -> Path:
    """The bundled model, fetched once into the user's cache as a first start would; the cache of this run links to it."""
    from levserve.settings.parse import parse_settings
    from levserve.weights.source import find_model

    settings = parse_settings([], {})
    path = find_model("smollm2-135m", revision="", cache_path=settings.cache_path, report=lambda _: None).path
    with suppress(FileExistsError):  # another worker may have linked it
        Path(os.environ[CACHE_VARIABLE], path.name).symlink_to(path)
    return path
