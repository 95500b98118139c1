"""The registry around a loader that tests can hold: loading, waiting, unloading, and reported failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.errors import Conflict, ModelNotFound, StartupError, Unavailable
from levserve.models import entry as entry_module
from levserve.models import registry as registry_module
from levserve.models.entry import Resident, Status
from levserve.models.registry import MakeRoom, Registry, Report
from levserve.observe.metrics import Metrics
from tests.waiting import wait_until

SIZES = {"a": 40, "b": 40, "c": 40, "huge": 1000, "bad": 1}
PATIENCE = 20.0


def resident(name: str, num_bytes: int = 0) -> Resident:
    nothing: Any = SimpleNamespace()
    model = ServedModel(name, nothing, 64, 4, 0, grammars=nothing, tools=nothing)
    return Resident(model=model, weight_bytes=num_bytes)


class FakeLoader:
    """`gate` holds every load; `loads` and `unloads` record what was done, `given` what each may take."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.given: dict[str, int] = {}
        self.known = list(SIZES)
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = True

    def names(self) -> Sequence[str]:
        return list(self.known)

    def aliases(self, name: str) -> tuple[str, ...]:
        return ()

    def load(self, name: str, report: Report, make_room: MakeRoom) -> Resident:
        self.loads.append(name)
        report("half way")
        assert self.gate.wait(PATIENCE)
        self.given[name] = make_room(SIZES[name], lambda: 100)
        if name == "bad" and self.is_broken:
            raise StartupError("its file is corrupt")
        return resident(name, SIZES[name])

    def unload(self, resident: Resident) -> None:
        self.unloads.append(resident.model.name)


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def registry(loader: FakeLoader) -> Iterator[Registry]:
    yield from stocked(loader, budget=100)


def stocked(loader: FakeLoader, **limits: int) -> Iterator[Registry]:
    registry = Registry(Engine(max_inflight=1, metrics=Metrics()))
    registry.set_loader(loader, **limits)
    registry.put(resident("a", SIZES["a"]))
    yield registry
    loader.gate.set()
    registry.close()
    registry.join()


def use(registry: Registry, name: str) -> None:
    """Uses a model as a request does: borrows it, waits for it, and gives it back."""
    with registry.borrow(name) as handle:
        assert handle.wait(PATIENCE)
        assert handle.model.name == name


def statuses(registry: Registry) -> dict[str, Status]:
    return {one.name: one.status for one in registry.describe()}


def test_a_model_is_loaded_when_it_is_first_asked_for_and_only_then(
    registry: Registry, loader: FakeLoader
) -> None:
    assert statuses(registry)["b"] is Status.LOADABLE and loader.loads == []
    use(registry, "b")
    use(registry, "b")
    assert loader.loads == ["b"] and statuses(registry)["b"] is Status.LOADED


def test_a_request_that_names_no_model_gets_the_first(registry: Registry) -> None:
    with registry.borrow() as handle:
        assert handle.model.name == "a"


def test_a_server_may_be_ready_before_any_model_is_loaded(loader: FakeLoader) -> None:
    registry = Registry(Engine(max_inflight=1, metrics=Metrics()))
    registry.set_loader(loader, budget=100)
    with pytest.raises(Unavailable):
        registry.engine.require_ready()
    registry.open("b")
    registry.engine.require_ready()
    assert registry.default_name == "b" and registry.loaded_names() == loader.loads == []
    with pytest.raises(Unavailable, match="'b' is not loaded"):
        _ = registry.default
    with registry.borrow() as handle:
        assert handle.wait(PATIENCE) and handle.model.name == registry.default.name == "b"
    registry.close()
    registry.join()


def test_many_who_ask_at_once_wait_for_one_load(registry: Registry, loader: FakeLoader) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: use(registry, "b"), range(32)))
    assert loader.loads == ["b"]


def test_who_waits_sees_how_far_it_is(registry: Registry, loader: FakeLoader) -> None:
    loader.gate.clear()
    with registry.borrow("b") as handle:
        wait_until(lambda: any(one.progress == "half way" for one in registry.describe()))
        assert not handle.wait(0.01)
        with pytest.raises(Unavailable, match=r"The model 'b' is still loading \(half way\)") as raised:
            _ = handle.model
        assert raised.value.retry_after_seconds > 0
        assert statuses(registry)["b"] is Status.LOADING
        loader.gate.set()
        assert handle.wait(PATIENCE) and handle.model.name == "b"


def test_the_least_recently_used_goes_when_memory_is_short(registry: Registry, loader: FakeLoader) -> None:
    use(registry, "b")
    use(registry, "a")
    use(registry, "c")
    assert loader.unloads == ["b"] and statuses(registry)["a"] is Status.LOADED


def test_no_more_models_are_loaded_than_may_be(loader: FakeLoader) -> None:
    for registry in stocked(loader, budget=10_000, max_loaded=2):
        for name in ("b", "c", "a", "b"):
            use(registry, name)
            assert sum(status is Status.LOADED for status in statuses(registry).values()) <= 2
        assert loader.unloads == ["a", "b", "c"]


def test_a_model_gets_an_equal_share_of_what_is_left(loader: FakeLoader) -> None:
    for registry in stocked(loader, budget=200, max_loaded=3):
        use(registry, "b")
        assert loader.given["b"] == 40 + (200 - 80) // 2  # one more may be loaded
        use(registry, "c")
        assert loader.given["c"] == 40 + (200 - 120)


def test_what_somebody_uses_is_never_unloaded(registry: Registry, loader: FakeLoader) -> None:
    with registry.borrow("a"), registry.borrow("b") as second:
        assert second.wait(PATIENCE)
        with registry.borrow("c") as third:
            assert third.wait(PATIENCE)
            with pytest.raises(Unavailable, match="no room for the model 'c': a, b take 80 B of 100 B"):
                _ = third.model
        with pytest.raises(Conflict, match="'b' has 1 requests running or waiting"):
            registry.unload("b")
        assert loader.unloads == []
    use(registry, "c")  # at once, as nothing was wrong with the model
    assert loader.unloads == ["b"]  # b was given back before a


def ask(registry: Registry, name: str, *, is_background: bool = False) -> None:
    """Raises `Unavailable` if there is no room."""
    with registry.borrow(name, is_background=is_background) as handle:
        assert handle.wait(PATIENCE)
        assert handle.model.name == name


def test_batches_give_up_a_model_whose_room_a_live_request_needs(loader: FakeLoader) -> None:
    for registry in stocked(loader, max_loaded=1):
        with registry.borrow("a", is_background=True):
            with pytest.raises(Unavailable, match="There is no room for the model 'b'"):
                ask(registry, "b")
            with pytest.raises(Unavailable, match="The room of the model 'a' is needed for another one"):
                registry.borrow("a", is_background=True)
            ask(registry, "a")
        with pytest.raises(Unavailable, match="needed for another one"):
            registry.borrow("a", is_background=True)
        ask(registry, "b")
        assert loader.unloads == ["a"]


def test_a_model_that_was_given_up_for_a_client_that_does_not_return_is_used_again(
    loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_module, "RETURN_SECONDS", 0.0)
    for registry in stocked(loader, max_loaded=1):
        with registry.borrow("a", is_background=True), pytest.raises(Unavailable):
            ask(registry, "b")
        ask(registry, "a", is_background=True)


def test_batches_take_no_room_that_a_live_request_used_a_moment_ago(
    loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in stocked(loader, max_loaded=1):
        ask(registry, "b", is_background=True)
        ask(registry, "a")
        with pytest.raises(Unavailable, match="There is no room for the model 'b'"):
            ask(registry, "b", is_background=True)
        monkeypatch.setattr(registry_module, "QUIET_SECONDS", 0.0)
        ask(registry, "b", is_background=True)
        assert loader.unloads == ["a", "b", "a"]


def test_a_batch_gives_up_no_model_for_another_batch(loader: FakeLoader) -> None:
    for registry in stocked(loader, max_loaded=1):
        with registry.borrow("a", is_background=True):
            with pytest.raises(Unavailable, match="There is no room"):
                ask(registry, "b", is_background=True)
            ask(registry, "a", is_background=True)


def test_a_model_that_never_fits_is_refused_with_the_sum(registry: Registry, loader: FakeLoader) -> None:
    with registry.borrow("huge") as handle:
        assert handle.wait(PATIENCE)
        with pytest.raises(
            Unavailable, match="'huge' cannot be loaded: it needs 1000 B, and --models-memory has 100 B"
        ):
            _ = handle.model
    assert loader.unloads == []


def test_a_failure_is_told_to_all_and_not_tried_again_at_once(
    registry: Registry, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        with registry.borrow("bad") as handle:
            assert handle.wait(PATIENCE)
            with pytest.raises(Unavailable, match="'bad' cannot be loaded: its file is corrupt") as raised:
                _ = handle.model
            assert raised.value.code == "model_not_loadable" and 1 <= raised.value.retry_after_seconds <= 10
    assert loader.loads == ["bad"]
    (told,) = [one for one in registry.describe() if one.name == "bad"]
    assert told.status is Status.LOADABLE and told.error is not None and "corrupt" in told.error
    loader.is_broken = False
    with registry.borrow("bad", insists=True) as handle:
        assert handle.wait(PATIENCE) and handle.model.name == "bad"


def test_after_a_while_a_failed_model_is_tried_again(
    registry: Registry, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "FAILED_SECONDS", 0.0)
    with registry.borrow("bad") as handle:
        assert handle.wait(PATIENCE)
    loader.is_broken = False
    use(registry, "bad")


def test_a_loader_that_fails_in_an_unknown_way_ends_nothing(registry: Registry, loader: FakeLoader) -> None:
    loader.known.append("unforeseen")  # it has no size: a KeyError
    with registry.borrow("unforeseen") as handle:
        assert handle.wait(PATIENCE)
        with pytest.raises(Unavailable, match="failed to load; the server's log says why"):
            _ = handle.model
    use(registry, "b")


def test_unknown_names_are_told_what_there_is(registry: Registry) -> None:
    with pytest.raises(
        ModelNotFound, match="The model 'x' does not exist; this server has 'a', 'b', 'c', 'huge', 'bad'"
    ):
        registry.borrow("x")


def test_what_is_added_later_can_be_asked_for_and_what_is_gone_cannot(
    registry: Registry, loader: FakeLoader
) -> None:
    loader.known = ["a", "new"]
    SIZES["new"] = 1
    use(registry, "new")
    assert list(statuses(registry)) == ["a", "new"]
    loader.known = ["new"]
    registry.refresh()
    assert list(statuses(registry)) == ["a", "new"], "a is still loaded"


def test_an_unloaded_model_is_loaded_again_on_its_next_use(registry: Registry, loader: FakeLoader) -> None:
    registry.unload("a")
    registry.unload("a")  # nothing to do
    assert loader.unloads == ["a"] and statuses(registry)["a"] is Status.LOADABLE
    use(registry, "a")
    assert loader.loads == ["a"]


def test_leaving_wakes_those_who_wait(registry: Registry, loader: FakeLoader) -> None:
    loader.gate.clear()
    with registry.borrow("b") as handle, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.wait, None)
        registry.close()
        assert waiting.result(PATIENCE)
        with pytest.raises(Unavailable, match="shutting down"):
            _ = handle.model


def test_a_client_that_leaves_wakes_its_thread(registry: Registry, loader: FakeLoader) -> None:
    loader.gate.clear()
    with registry.borrow("b") as handle, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.wait, None)
        handle.abandon()
        assert waiting.result(PATIENCE) and handle.is_abandoned


def test_the_only_model_of_a_server_stays() -> None:
    registry = Registry(Engine(max_inflight=1, metrics=Metrics()))
    registry.publish(resident("only"))
    with pytest.raises(Conflict, match="was given one model"):
        registry.unload("only")
    with pytest.raises(ModelNotFound, match="The model 'x' does not exist; this server has 'only'"):
        registry.borrow("x")


def test_admission_counts_the_tokens_of_what_is_loaded() -> None:
    engine = Engine(max_inflight=2, metrics=Metrics())
    registry = Registry(engine)
    registry.publish(resident("a"))
    assert engine.admission.max_tokens == 2 * 64
    registry.put(resident("b"))
    assert engine.admission.max_tokens == 4 * 64


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["a", "b", "c", "bad", "unload a", "unload b", "unload c"]), max_size=12))
def test_whatever_is_asked_the_budget_holds(asked: list[str]) -> None:
    loader = FakeLoader()
    for registry in stocked(loader, budget=100):
        for word in asked:
            if word.startswith("unload"):
                registry.unload(word.removeprefix("unload "))
                continue
            with registry.borrow(word) as handle:
                assert handle.wait(PATIENCE)
                assert (statuses(registry)[word] is Status.LOADED) is (word != "bad")
            held = [one.resident.num_bytes for one in registry.describe() if one.resident is not None]
            assert sum(held) <= 100 and not any(one.num_handles for one in registry.describe())
