"""Batches on a server with several models, of which one at a time is loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from levserve.batch import runner as runner_module
from levserve.errors import StartupError
from levserve.models import registry as registry_module
from levserve.models.entry import Resident
from levserve.models.registry import MakeRoom, Report
from tests.fake_app import App, serving
from tests.fake_device import MAX_SEQ_LEN, MODEL, serve_toy
from tests.pure.test_batch import TEXT, make_line
from tests.pure.test_batches import create, read, results, wait_ended
from tests.waiting import wait_until


class ToyLoader:
    """Loads copies of the fake device's model. `loads` records their names."""

    def __init__(self) -> None:
        self.loads: list[str] = []

    def names(self) -> Sequence[str]:
        return [MODEL, "other", "broken"]

    def aliases(self, name: str) -> tuple[str, ...]:
        return ()

    def load(self, name: str, report: Report, make_room: MakeRoom) -> Resident:
        if name == "broken":
            raise StartupError("its file is corrupt")
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


def test_a_live_request_gets_the_room_of_a_model_that_a_batch_uses(
    app: App, loader: ToyLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the lines that run have ended. The batch goes on when nobody has used the other one for a while."""
    monkeypatch.setattr(registry_module, "QUIET_SECONDS", 0.5)
    batch = create(app, b"\n".join(line(number, MODEL) for number in range(500)))
    wait_until(lambda: len(app.device.requests) > 0)
    live = {"model": "other", "prompt": "t17", "max_tokens": 2}
    statuses = [app.post("/v1/completions", live).status_code]
    while statuses[-1] == 503 and len(statuses) < 10:
        time.sleep(0.1)
        statuses.append(app.post("/v1/completions", live).status_code)
    assert statuses[-1] == 200
    assert read(app, batch["id"])["status"] == "in_progress" and loader.loads == ["other"]
    ended = wait_ended(app, batch["id"])
    assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 500)
    assert loader.loads == ["other", MODEL]


def test_lines_for_a_model_that_cannot_be_loaded_get_the_reason_and_the_others_run(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "GIVE_UP_SECONDS", 0.0)
    lines = [line(0, "broken"), line(1, MODEL), line(2, "broken"), line(3, MODEL)]
    ended = wait_ended(app, create(app, b"\n".join(lines))["id"])
    assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 2)
    failed = results(app, ended["error_file_id"])
    assert set(failed) == {"line 0", "line 2"}
    for one in failed.values():
        assert one["response"]["status_code"] == 503
        assert one["response"]["body"]["error"]["code"] == "model_not_loadable"
        assert "its file is corrupt" in one["response"]["body"]["error"]["message"]
