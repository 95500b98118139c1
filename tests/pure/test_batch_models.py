"""Batches on a server with several models, of which one at a time is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from levserve.models.entry import Resident
from levserve.models.registry import MakeRoom, Report
from tests.fake_app import App, serving
from tests.fake_device import MAX_SEQ_LEN, MODEL, serve_toy
from tests.pure.test_batch import TEXT, make_line
from tests.pure.test_batches import create, results, wait_ended


class ToyLoader:
    """Loads copies of the fake device's model. `loads` records their names."""

    def __init__(self) -> None:
        self.loads: list[str] = []

    def names(self) -> Sequence[str]:
        return [MODEL, "other"]

    def aliases(self, name: str) -> tuple[str, ...]:
        return ()

    def load(self, name: str, report: Report, make_room: MakeRoom) -> Resident:
        make_room(1, lambda: 100)
        self.loads.append(name)
        return Resident(model=serve_toy(name, MAX_SEQ_LEN))

    def unload(self, resident: Resident) -> None:
        pass


@pytest.fixture
def loader() -> ToyLoader:
    return ToyLoader()


@pytest.fixture
def app(loader: ToyLoader) -> Iterator[App]:
    with serving() as app:
        app.registry.set_loader(loader, max_loaded=1)
        yield app
        app.registry.close()
        app.registry.join()


def line(number: int, model: str, prompt: str = "t17") -> bytes:
    return make_line(number, TEXT, {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 2})


def test_a_batch_uses_models_that_do_not_fit_together_one_after_another(app: App, loader: ToyLoader) -> None:
    lines = [line(number, ("other", MODEL)[number % 2]) for number in range(30)]
    ended = wait_ended(app, create(app, b"\n".join(lines))["id"])
    assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 30)
    answers = results(app, ended["output_file_id"])
    for number in range(30):
        body = answers[f"line {number}"]["response"]["body"]
        assert body["model"] == ("other", MODEL)[number % 2]
        assert body["choices"][0]["text"] == " t18 t19"
    assert loader.loads == ["other", MODEL]
