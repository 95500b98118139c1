"""The library alone, around a loader that one can hold: who is loaded, who waits, who goes, and what a failure tells."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from levserve.engine import library as library_module
from levserve.engine.engine import Engine, ServedModel
from levserve.engine.entry import Resident, Status
from levserve.engine.library import Library, MakeRoom, Report
from levserve.errors import Conflict, ModelNotFound, StartupError, Unavailable
from levserve.metrics import Metrics
from tests.waiting import wait_until

SIZES = {"a": 40, "b": 40, "c": 40, "huge": 1000, "bad": 1}
PATIENCE = 20.0


def resident(name: str, num_bytes: int = 0) -> Resident:
    tokenizer: object = SimpleNamespace()
    return Resident(model=ServedModel(name, tokenizer, 64, 4, 0), weight_bytes=num_bytes)  # type: ignore[arg-type]


class FakeLoader:
    """`gate` holds every load; `loads` and `unloads` are what was done, `given` what each model was told it may take."""

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
def library(loader: FakeLoader) -> Iterator[Library]:
    yield from stocked(loader, budget=100)


def stocked(loader: FakeLoader, **limits: int) -> Iterator[Library]:
    library = Library(Metrics(), lambda residents: None)
    library.stock(loader, **limits)
    library.put(resident("a", SIZES["a"]))
    yield library
    loader.gate.set()
    library.close()
    library.join()


def use(library: Library, name: str) -> None:
    """As a request does it: borrows, waits, and gives back."""
    with library.borrow(name) as loan:
        assert loan.wait(PATIENCE)
        assert loan.model.name == name


def statuses(library: Library) -> dict[str, Status]:
    return {one.name: one.status for one in library.describe()}


def test_a_model_is_loaded_when_it_is_first_asked_for_and_only_then(library: Library, loader: FakeLoader) -> None:
    assert statuses(library)["b"] is Status.LOADABLE and loader.loads == []
    use(library, "b")
    use(library, "b")
    assert loader.loads == ["b"] and statuses(library)["b"] is Status.LOADED


def test_a_request_that_names_no_model_gets_the_first(library: Library) -> None:
    with library.borrow() as loan:
        assert loan.model.name == "a"


def test_many_who_ask_at_once_wait_for_one_load(library: Library, loader: FakeLoader) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: use(library, "b"), range(32)))
    assert loader.loads == ["b"]


def test_who_waits_sees_how_far_it_is(library: Library, loader: FakeLoader) -> None:
    loader.gate.clear()
    with library.borrow("b") as loan:
        wait_until(lambda: any(one.progress == "half way" for one in library.describe()))
        assert not loan.wait(0.01)
        with pytest.raises(Unavailable, match=r"The model 'b' is still loading \(half way\)") as raised:
            loan.model
        assert raised.value.retry_after_seconds > 0
        assert statuses(library)["b"] is Status.LOADING
        loader.gate.set()
        assert loan.wait(PATIENCE) and loan.model.name == "b"


def test_the_least_recently_used_goes_when_memory_is_short(library: Library, loader: FakeLoader) -> None:
    use(library, "b")
    use(library, "a")
    use(library, "c")
    assert loader.unloads == ["b"] and statuses(library)["a"] is Status.LOADED


def test_no_more_models_are_loaded_than_may_be(loader: FakeLoader) -> None:
    for library in stocked(loader, budget=10_000, max_loaded=2):
        for name in ("b", "c", "a", "b"):
            use(library, name)
            assert sum(status is Status.LOADED for status in statuses(library).values()) <= 2
        assert loader.unloads == ["a", "b", "c"]


def test_a_model_gets_an_equal_share_of_what_is_left(loader: FakeLoader) -> None:
    for library in stocked(loader, budget=200, max_loaded=3):
        use(library, "b")
        assert loader.given["b"] == 40 + (200 - 80) // 2  # one more may come
        use(library, "c")
        assert loader.given["c"] == 40 + (200 - 120)


def test_what_somebody_uses_is_never_unloaded(library: Library, loader: FakeLoader) -> None:
    with library.borrow("a"), library.borrow("b") as second:
        assert second.wait(PATIENCE)
        with library.borrow("c") as third:
            assert third.wait(PATIENCE)
            with pytest.raises(Unavailable, match="no room for the model 'c': a, b take 80 B of 100 B"):
                third.model
        with pytest.raises(Conflict, match="'b' has 1 requests running or waiting"):
            library.unload("b")
        assert loader.unloads == []
    use(library, "c")  # at once: nothing was wrong with the model
    assert loader.unloads == ["b"]  # which was given back before a


def test_a_model_that_never_fits_is_refused_with_the_sum(library: Library, loader: FakeLoader) -> None:
    with library.borrow("huge") as loan:
        assert loan.wait(PATIENCE)
        with pytest.raises(Unavailable, match="'huge' cannot be loaded: it needs 1000 B, and --models-memory has 100 B"):
            loan.model
    assert loader.unloads == []


def test_a_failure_is_told_to_all_and_not_tried_again_at_once(
    library: Library, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        with library.borrow("bad") as loan:
            assert loan.wait(PATIENCE)
            with pytest.raises(Unavailable, match="'bad' cannot be loaded: its file is corrupt") as raised:
                loan.model
            assert raised.value.code == "model_not_loadable" and 1 <= raised.value.retry_after_seconds <= 10
    assert loader.loads == ["bad"]
    (told,) = [one for one in library.describe() if one.name == "bad"]
    assert told.status is Status.LOADABLE and told.error is not None and "corrupt" in told.error
    loader.is_broken = False
    with library.borrow("bad", insists=True) as loan:
        assert loan.wait(PATIENCE) and loan.model.name == "bad"


def test_after_a_while_a_failed_model_is_tried_again(library: Library, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "FAILED_SECONDS", 0.0)
    with library.borrow("bad") as loan:
        assert loan.wait(PATIENCE)
    loader.is_broken = False
    use(library, "bad")


def test_a_loader_that_fails_in_an_unknown_way_ends_nothing(library: Library, loader: FakeLoader) -> None:
    loader.known.append("unforeseen")  # it has no size: a KeyError
    with library.borrow("unforeseen") as loan:
        assert loan.wait(PATIENCE)
        with pytest.raises(Unavailable, match="failed to load; the server's log says why"):
            loan.model
    use(library, "b")


def test_unknown_names_are_told_what_there_is(library: Library) -> None:
    with pytest.raises(ModelNotFound, match="The model 'x' does not exist; this server has 'a', 'b', 'c', 'huge', 'bad'"):
        library.borrow("x")


def test_what_is_added_later_can_be_asked_for_and_what_is_gone_cannot(library: Library, loader: FakeLoader) -> None:
    loader.known = ["a", "new"]
    SIZES["new"] = 1
    use(library, "new")
    assert list(statuses(library)) == ["a", "new"]
    loader.known = ["new"]
    library.refresh()
    assert list(statuses(library)) == ["a", "new"], "a is still loaded"


def test_an_unloaded_model_is_loaded_again_on_its_next_use(library: Library, loader: FakeLoader) -> None:
    library.unload("a")
    library.unload("a")  # nothing to do
    assert loader.unloads == ["a"] and statuses(library)["a"] is Status.LOADABLE
    use(library, "a")
    assert loader.loads == ["a"]


def test_leaving_wakes_those_who_wait(library: Library, loader: FakeLoader) -> None:
    loader.gate.clear()
    with library.borrow("b") as loan, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loan.wait, None)
        library.close()
        assert waiting.result(PATIENCE)
        with pytest.raises(Unavailable, match="shutting down"):
            loan.model


def test_a_client_that_leaves_wakes_its_thread(library: Library, loader: FakeLoader) -> None:
    loader.gate.clear()
    with library.borrow("b") as loan, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loan.wait, None)
        loan.abandon()
        assert waiting.result(PATIENCE) and loan.is_abandoned


def test_the_only_model_of_a_server_stays() -> None:
    engine = Engine(max_inflight=1, metrics=Metrics())
    engine.publish(resident("only"))
    with pytest.raises(Conflict, match="was given one model"):
        engine.library.unload("only")
    with pytest.raises(ModelNotFound, match="The model 'x' does not exist; this server has 'only'"):
        engine.library.borrow("x")


def test_admission_counts_the_tokens_of_what_is_loaded() -> None:
    engine = Engine(max_inflight=2, metrics=Metrics())
    engine.publish(resident("a"))
    assert engine.admission.max_tokens == 2 * 64
    engine.library.put(resident("b"))
    assert engine.admission.max_tokens == 4 * 64


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "bad", "unload a", "unload b", "unload c"]), max_size=12))
def test_whatever_is_asked_the_budget_holds(asked: list[str]) -> None:
    loader = FakeLoader()
    for library in stocked(loader, budget=100):
        for word in asked:
            if word.startswith("unload"):
                library.unload(word.removeprefix("unload "))
                continue
            with library.borrow(word) as loan:
                assert loan.wait(PATIENCE)
                assert (statuses(library)[word] is Status.LOADED) is (word != "bad")
            held = [one.resident.num_bytes for one in library.describe() if one.resident is not None]
            assert sum(held) <= 100 and not any(one.num_loans for one in library.describe())
