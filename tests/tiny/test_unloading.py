"""A model that is unloaded leaves nothing behind."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any
from weakref import WeakSet

import jax
import pytest

from levserve.device.programs import Programs
from levserve.engine.engine import Engine
from levserve.models.loader import load_first
from levserve.models.registry import Registry
from levserve.models.startup import serve
from levserve.observe.metrics import Metrics
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.settings.parse import parse_settings
from tests.conftest import GOLDEN
from tests.engines import cache_folder, read, without_older_objects
from tests.waiting import wait_until

FLAGS = (
    "--dtype",
    "float32",
    "--max-running",
    "4",
    "--prefill-chunk",
    "16",
    "--page-size",
    "4",
    "--device",
    "cpu",
)
CASES = {
    family: json.loads((GOLDEN / family / "golden.json").read_text())["cases"][2]
    for family in ("llama", "qwen2")
}


@without_older_objects()
def test_an_unloaded_model_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights, pages and programs: nothing that jax made for it is alive."""
    programs: WeakSet[Programs] = WeakSet()
    make = Programs.__init__

    def make_and_note(self: Programs, *given: Any) -> None:
        programs.add(self)
        make(self, *given)

    monkeypatch.setattr(Programs, "__init__", make_and_note)
    for name in ("llama", "qwen2"):
        (tmp_path / name).symlink_to(GOLDEN / name)
    given = ["--models-dir", str(tmp_path), "--max-running", "4", "--cache-dir", str(cache_folder()), *FLAGS]
    settings = parse_settings(given, {})
    arrays = jax.live_arrays()  # held, so that arrays of other tests do not go between two counts
    engine = Engine(max_inflight=8, metrics=Metrics())
    registry = Registry(engine)
    thread = threading.Thread(
        target=lambda: serve(registry, *load_first(settings, registry, report=lambda _: None))
    )
    thread.start()
    try:
        assert engine.wait_ready(240)
        with registry.borrow("llama") as handle:
            kept = handle.resident.num_bytes
        with registry.borrow("qwen2") as handle:
            assert handle.wait(240) and handle.model.name == "qwen2"
            taken = handle.resident.num_bytes
            wait_until(
                lambda: num_bytes_besides(arrays) >= kept + taken
            )  # a program's first run replaces its model's pages
            request = GenerationRequest("one", tuple(CASES["qwen2"]["prompt"]), 24, Sampling(temperature=0.0))
            (answer,) = read(engine.submit([request], handle.model))
            assert answer.tokens == CASES["qwen2"]["greedy"]
        assert len(programs) == 2
        gc.freeze()  # as a server does when it is ready
        registry.unload("qwen2")
        wait_until(lambda: abs(num_bytes_besides(arrays) - kept) < taken // 100)
        wait_until(lambda: num_alive(programs) == 1)  # a thread that compiles for it may end later
    finally:
        engine.stop()
        thread.join(60)
        registry.close()
        registry.join()
    assert not thread.is_alive()


def num_bytes_besides(others: list[jax.Array]) -> int:
    gc.collect()
    known = {id(array) for array in others}
    return sum(array.nbytes for array in jax.live_arrays() if id(array) not in known)


def num_alive(objects: WeakSet[Programs]) -> int:
    gc.collect()
    return len(objects)
