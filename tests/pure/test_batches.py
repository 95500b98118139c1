"""/v1/files and /v1/batches around the fake device: driven by OpenAI's SDK, persistent, owned, bounded."""

from __future__ import annotations

import io
import json
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from werkzeug.test import TestResponse

from levserve.batch.done import DoneLines
from levserve.batch.results import ResultFile
from levserve.models.registry import Registry
from levserve.schedule.request import BACKGROUND
from levserve.settings.settings import Settings
from levserve.web.batches import store as store_module
from levserve.web.batches import worker as worker_module
from levserve.web.batches.disk import DiskFolder
from levserve.web.batches.files import FileStore
from levserve.web.batches.objects import BatchBody, BatchObject
from levserve.web.batches.store import BatchStore
from levserve.web.batches.worker import BatchWorker
from tests.fake_app import App, serving, wsgi_server
from tests.pure.test_batch import CHAT, TEXT, VECTORS, make_line
from tests.pure.test_metrics import parse
from tests.waiting import wait_until

ENDED = ("completed", "failed", "expired", "cancelled")
HANGS = {"model": "toy", "prompt": "t6"}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


def body_of(number: int) -> dict[str, Any]:
    return {"model": "toy", "prompt": f"t{20 + number}", "temperature": 0, "max_tokens": 2}


def make_file(count: int, *more: bytes) -> bytes:
    return b"\n".join([*(make_line(number, TEXT, body_of(number)) for number in range(count)), *more])


def upload(app: App, data: bytes, key: str = "", **fields: str) -> TestResponse:
    form = {"purpose": "batch", "file": (io.BytesIO(data), "in.jsonl")} | fields
    return app.client.post("/v1/files", data=form, headers=bearer(key))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def create(app: App, data: bytes, endpoint: str = TEXT, **fields: Any) -> dict[str, Any]:
    uploaded = upload(app, data).json
    assert uploaded is not None
    body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"} | fields
    reply = app.post("/v1/batches", body)
    assert reply.status_code == 200, reply.text
    batch: dict[str, Any] = reply.json or {}
    return batch


def read(app: App, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = app.client.get(f"/v1/batches/{batch_id}").json or {}
    return found


def wait_ended(app: App, batch_id: str) -> dict[str, Any]:
    wait_until(lambda: read(app, batch_id)["status"] in ENDED)
    return read(app, batch_id)


def results(app: App, file_id: str | None) -> dict[str, Any]:
    """The results in a file, by custom id."""
    if file_id is None:
        return {}
    content = app.client.get(f"/v1/files/{file_id}/content", buffered=True).text
    shown = [json.loads(line) for line in content.splitlines()]
    assert len({one["custom_id"] for one in shown}) == len(shown)
    return {one["custom_id"]: one for one in shown}


def test_the_sdk_uploads_runs_reads_lists_and_deletes(app: App) -> None:
    wrong = make_line(99, TEXT, {"model": "toy", "prompt": "t17", "temperature": 9})
    with (
        wsgi_server(app.client.application) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        data = make_file(30, wrong)
        uploaded = client.files.create(
            file=("in.jsonl", io.BytesIO(data)),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert (uploaded.bytes, uploaded.filename, uploaded.purpose) == (len(data), "in.jsonl", "batch")
        assert uploaded.expires_at == uploaded.created_at + 7200
        assert client.files.content(uploaded.id).content == data
        batch = client.batches.create(
            input_file_id=uploaded.id, endpoint=TEXT, completion_window="24h", metadata={"a": "b"}
        )
        assert batch.status in ("validating", "in_progress", "finalizing", "completed")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts is not None and batch.metadata == {"a": "b"}
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (31, 30, 1)
        assert batch.output_file_id is not None and batch.error_file_id is not None
        answered = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(one["custom_id"] for one in answered) == sorted(f"line {n}" for n in range(30))
        for one in answered:
            first = 21 + int(one["custom_id"].removeprefix("line "))
            assert one["response"]["body"]["choices"][0]["text"] == f" t{first} t{first + 1}"
        (failed,) = client.files.content(batch.error_file_id).text.splitlines()
        assert json.loads(failed)["response"]["body"]["error"]["param"] == "temperature"
        assert batch.id in [one.id for one in client.batches.list(limit=1)]
        names = [one.id for one in client.files.list()]
        assert {uploaded.id, batch.output_file_id, batch.error_file_id} <= set(names)
        assert [one.id for one in client.files.list(purpose="batch_output", order="asc")][-2:]
        assert client.files.delete(uploaded.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(uploaded.id)
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_no")
        with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
            client.batches.cancel(batch.id)
    samples = parse(app.client.get("/metrics").text)
    assert samples['levserve_batches{status="completed"}'] == 1
    assert samples['levserve_batches{status="in_progress"}'] == 0
    assert samples['levserve_batch_requests_total{outcome="completed"}'] == 30
    assert samples['levserve_batch_requests_total{outcome="failed"}'] == 1


def test_the_requests_of_a_batch_are_background_work(app: App) -> None:
    before = len(app.device.requests)
    batch = create(app, make_file(2, make_line(7, TEXT, {**body_of(7), "priority": -5})))
    assert wait_ended(app, batch["id"])["status"] == "completed"
    asked = app.device.requests[before:]
    assert len(asked) == 3 and all(one.priority >= BACKGROUND for one in asked)
    assert app.engine.admission.room().free_requests == app.engine.max_inflight


def test_batches_take_no_places_of_live_requests() -> None:
    with serving(max_inflight=2) as app:
        hanging = create(app, b"\n".join(make_line(n, TEXT, HANGS) for n in range(6)))
        wait_until(lambda: len(app.device.requests) >= 2)
        assert app.complete("t17", temperature=0, max_tokens=2)["choices"][0]["text"] == " t18 t19"
        app.post(f"/v1/batches/{hanging['id']}/cancel", {})
        assert wait_ended(app, hanging["id"])["status"] == "cancelled"


@pytest.mark.parametrize("endpoint", [CHAT, VECTORS])
def test_every_endpoint_has_batches(app: App, endpoint: str) -> None:
    fields: dict[str, Any] = {"input": "t17"} if endpoint == VECTORS else {"temperature": 0}
    if endpoint == CHAT:
        fields |= {"messages": [{"role": "user", "content": "t17"}], "max_tokens": 2}
    batch = create(app, make_line(1, endpoint, {"model": "toy"} | fields), endpoint)
    batch = wait_ended(app, batch["id"])
    assert (batch["status"], batch["error_file_id"]) == ("completed", None)
    assert results(app, batch["output_file_id"])["line 1"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("data", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (b"rubbish", "invalid_json_line", 1),
        (make_file(1, b"{}"), "missing_required_parameter", 2),
        (make_file(2, make_line(1, TEXT, {})), "duplicate_custom_id", 3),
        (make_file(1, make_line(5, CHAT, {})), "invalid_url", 2),
        (make_file(1, make_line(5, TEXT, {}, method="GET")), "invalid_method", 2),
        (make_file(1, make_line(5, TEXT, {}, custom_id=5)), "invalid_type", 2),
        (b"\xff\xfe", "invalid_json_line", 1),
    ],
)
def test_a_file_that_is_wrong_fails_the_batch_and_tells_the_line(
    app: App, data: bytes, code: str, line: int | None
) -> None:
    batch = wait_ended(app, create(app, data)["id"])
    assert batch["status"] == "failed" and batch["failed_at"]
    (problem,) = batch["errors"]["data"]
    assert (problem["code"], problem["line"]) == (code, line)
    assert not batch["output_file_id"] and not batch["error_file_id"]


def test_a_file_of_nothing_but_mistakes_has_a_list_of_bounded_length(app: App) -> None:
    batch = wait_ended(app, create(app, b"rubbish\n" * 5000)["id"])
    assert 10 <= len(batch["errors"]["data"]) <= 100


def test_requests_that_are_refused(app: App) -> None:
    good = upload(app, b"x").json
    assert good is not None
    right = {"input_file_id": good["id"], "endpoint": TEXT, "completion_window": "24h"}
    for fields, param in (
        ({"input_file_id": "file-no"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"endpoint": "/v1/audio"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "90d"}, "completion_window"),
        ({"completion_window": ""}, "completion_window"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"output_expires_after": {"seconds": 5}}, "output_expires_after.seconds"),
    ):
        status, named = app.refuse("/v1/batches", right | fields)
        assert status == 400
        assert (named or "").startswith(param.removesuffix("[...]"))
    for missing in right:
        assert app.refuse(
            "/v1/batches", {name: value for name, value in right.items() if name != missing}
        ) == (
            400,
            missing,
        )
    for form, param in (
        ({"purpose": "batch"}, "file"),
        ({"file": (io.BytesIO(b"x"), "x")}, "purpose"),
        ({"file": (io.BytesIO(b"x"), "x"), "purpose": "fine-tune"}, "purpose"),
        (
            {"file": (io.BytesIO(b"x"), "x"), "purpose": "batch", "expires_after[seconds]": "5"},
            "expires_after",
        ),
        (
            {
                "file": (io.BytesIO(b"x"), "x"),
                "purpose": "batch",
                "expires_after[seconds]": "0000036009999999",
            },
            "expires_after",
        ),
        (
            {"file": (io.BytesIO(b"x"), "x"), "purpose": "batch", "expires_after[anchor]": "now"},
            "expires_after",
        ),
    ):
        reply = app.client.post("/v1/files", data=form, content_type="multipart/form-data")
        assert reply.status_code == 400 and reply.json is not None
        assert reply.json["error"]["param"].startswith(param)
    assert app.post("/v1/files", {"purpose": "batch"}).status_code == 415
    for path in (
        "/v1/files/file-no",
        "/v1/files/file-no/content",
        "/v1/files/..%2Fbatches",
        "/v1/batches/no",
    ):
        assert app.client.get(path).status_code == 404
    for limit, code in (
        ("0", "integer_below_min_value"),
        ("-1", "integer_below_min_value"),
        ("00000000200", "integer_above_max_value"),
        ("1" * 5000, "integer_above_max_value"),
        ("many", "invalid_type"),
    ):
        reply = app.client.get(f"/v1/batches?limit={limit}")
        assert reply.status_code == 400 and reply.json is not None
        assert (reply.json["error"]["param"], reply.json["error"]["code"]) == ("limit", code)
    assert app.client.get("/v1/files?after=none").status_code == 400


def test_a_page_of_another_site_cannot_send_a_form_and_the_servers_own_can(app: App) -> None:
    for site, status in ((None, 403), ("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        headers = {"Origin": "https://elsewhere.example"} | ({"Sec-Fetch-Site": site} if site else {})
        form = {"purpose": "batch", "file": (io.BytesIO(b"x"), "x")}
        assert app.client.post("/v1/files", data=form, headers=headers).status_code == status


def test_files_and_batches_belong_to_their_keys() -> None:
    with serving(api_key="one", file_keys=("two",)) as app:
        mine = upload(app, make_file(1), "one").json
        assert mine is not None
        body = {"input_file_id": mine["id"], "endpoint": TEXT, "completion_window": "1h"}
        assert app.client.post("/v1/batches", json=body, headers=bearer("two")).status_code == 400
        batch = app.client.post("/v1/batches", json=body, headers=bearer("one")).json
        assert batch is not None
        path = f"/v1/batches/{batch['id']}"
        wait_until(lambda: app.client.get(path, headers=bearer("one")).json["status"] == "completed")  # type: ignore[index]
        output = app.client.get(path, headers=bearer("one")).json["output_file_id"]  # type: ignore[index]
        paths = [path, f"/v1/files/{mine['id']}", f"/v1/files/{output}", f"/v1/files/{output}/content"]
        for one in paths:
            assert app.client.get(one, headers=bearer("one"), buffered=True).status_code == 200
            assert app.client.get(one, headers=bearer("two")).status_code == 404
            assert app.client.get(one).status_code == 401
        assert app.client.delete(f"/v1/files/{output}", headers=bearer("two")).status_code == 404
        assert app.client.post(f"{path}/cancel", headers=bearer("two")).status_code == 404
        for one in ("/v1/files", "/v1/batches"):
            assert app.client.get(one, headers=bearer("two")).json["data"] == []  # type: ignore[index]


def test_limits_of_files_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(max_file_bytes=1000, files_disk=2500, max_batch_requests=3) as app:
        assert upload(app, b"x" * 1001).status_code == 413
        for _ in range(2):
            assert upload(app, b"x" * 1000).status_code == 200
        refused = upload(app, b"x" * 1000)
        assert refused.status_code == 400 and refused.json is not None
        assert refused.json["error"]["code"] == "no_room"
        for one in app.client.get("/v1/files").json["data"]:  # type: ignore[index]
            assert app.client.delete(f"/v1/files/{one['id']}").status_code == 200
        batch = wait_ended(app, create(app, make_file(4))["id"])
        assert batch["errors"]["data"][0]["code"] == "too_many_requests"
        monkeypatch.setattr(store_module, "MAX_OPEN", 1)
        hanging = create(app, make_line(1, TEXT, HANGS))
        body = {"input_file_id": hanging["input_file_id"], "endpoint": TEXT, "completion_window": "1d"}
        reply = app.post("/v1/batches", body)
        assert reply.status_code == 429 and "Retry-After" in reply.headers
        assert app.client.delete(f"/v1/files/{hanging['input_file_id']}").status_code == 409
        app.post(f"/v1/batches/{hanging['id']}/cancel", {})
        wait_ended(app, hanging["id"])
        assert app.client.delete(f"/v1/files/{hanging['input_file_id']}").status_code == 200


def test_a_batch_that_is_cancelled_keeps_the_results_that_are_there() -> None:
    with serving() as app:
        batch = create(app, make_file(5, make_line(9, TEXT, HANGS)))
        wait_until(lambda: read(app, batch["id"])["request_counts"]["completed"] == 5)
        assert app.post(f"/v1/batches/{batch['id']}/cancel", {}).json["status"] == "cancelling"  # type: ignore[index]
        batch = wait_ended(app, batch["id"])
        assert batch["status"] == "cancelled" and batch["cancelled_at"] and batch["cancelling_at"]
        assert len(results(app, batch["output_file_id"])) == 5 and batch["error_file_id"] is None
        assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 0}
        wait_until(lambda: any(event == "cancel" for event, _ in list(app.device.events.queue)))


def test_a_server_that_is_started_again_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    wrong = make_line(8, TEXT, {"model": "toy"})
    with serving(state_dir=str(tmp_path)) as app:
        batch = create(app, make_file(5, wrong, make_line(9, TEXT, HANGS)))
        wait_until(lambda: read(app, batch["id"])["request_counts"]["completed"] == 5)
        waiting = create(app, make_file(3))
    with (tmp_path / "files" / f"file-{batch['id'].removeprefix('batch_')}o").open("ab") as file:
        file.write(b'{"id":"batch_req_1')  # half a line, as a kill leaves it
    with serving(state_dir=str(tmp_path), obeys=False) as app:
        ended = wait_ended(app, batch["id"])
        assert ended["status"] == "completed" and ended["created_at"] == batch["created_at"]
        assert ended["request_counts"] == {"total": 7, "completed": 6, "failed": 1}
        assert set(results(app, ended["output_file_id"])) == {*(f"line {n}" for n in range(5)), "line 9"}
        assert wait_ended(app, waiting["id"])["status"] == "completed"
        assert len(app.device.requests) == 1 + 3
    with serving(state_dir=str(tmp_path)) as app:
        assert read(app, batch["id"]) == ended
        assert len(results(app, ended["output_file_id"])) == 6
        assert not app.device.requests


def test_a_server_that_starts_before_the_old_one_has_ended_waits_for_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "RETRY_SECONDS", 0.05)
    with ExitStack() as old_server:
        old = old_server.enter_context(serving(state_dir=str(tmp_path)))
        batch = create(old, make_file(3, make_line(9, TEXT, HANGS)))
        wait_until(lambda: read(old, batch["id"])["request_counts"]["completed"] == 3)
        with serving(state_dir=str(tmp_path), obeys=False) as new:
            wait_until(lambda: (worker_module.__name__, "WARNING") in [_kind(one) for one in caplog.records])
            assert read(new, batch["id"])["status"] == "in_progress"
            old_server.close()
            ended = wait_ended(new, batch["id"])
            assert ended["status"] == "completed" and len(new.device.requests) == 1
            assert set(results(new, ended["output_file_id"])) == {*(f"line {n}" for n in range(3)), "line 9"}


def _kind(record: logging.LogRecord) -> tuple[str, str]:
    return record.name, record.levelname


def test_a_batch_that_fails_leaves_the_results_that_another_server_is_writing(tmp_path: Path) -> None:
    with serving() as app:
        clocked = Clocked(app.registry, tmp_path)
        try:
            batch_id = clocked.create(make_line(9, TEXT, HANGS))
            waiting = clocked.create(make_file(1))
            path = clocked.files.path_of(f"file-{waiting.removeprefix('batch_')}o")
            with ResultFile(path, DoneLines()):
                clocked.files.path_of(clocked.get(waiting).input_file_id).unlink()
                clocked.batches.cancel(batch_id)
                wait_until(lambda: clocked.get(waiting).status == "failed")
                clocked.worker.close()
                assert path.exists()
        finally:
            clocked.worker.close()


def test_what_the_disk_does_not_take_is_refused_with_the_reason_and_a_time_to_come_again(
    tmp_path: Path,
) -> None:
    with serving(state_dir=str(tmp_path)) as app:
        uploaded = upload(app, make_file(1)).json or {}
        (tmp_path / "batches").rmdir()
        (tmp_path / "batches").touch()  # no folder can be made here
        body = {"input_file_id": uploaded["id"], "endpoint": TEXT, "completion_window": "24h"}
        for what, reply in (
            ("file", upload(app, make_file(1))),
            ("batch", app.post("/v1/batches", body)),
        ):
            assert (reply.status_code, reply.headers["Retry-After"]) == (503, "60")
            message = (reply.json or {})["error"]["message"]
            assert message == f"The server cannot keep the {what}: File exists."


def test_rubbish_in_the_folder_is_skipped(tmp_path: Path) -> None:
    for name, text in (("files/file-1.json", "{}"), ("files/x.part", ""), ("batches/batch_1.json", "[")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    record = {
        "owner": "",
        "file": {"id": "../x", "bytes": 1, "created_at": 1, "expires_at": 9, "filename": ""},
    }
    (tmp_path / "files" / "file-2.json").write_text(json.dumps(record))
    with serving(state_dir=str(tmp_path)) as app:
        assert app.client.get("/v1/files").json["data"] == []  # type: ignore[index]
        assert app.client.get("/v1/batches").json["data"] == []  # type: ignore[index]
    assert not (tmp_path / "files" / "x.part").exists()


class Clocked:
    """A worker with a clock that only the test moves. `on_look` is called when somebody reads it."""

    def __init__(self, registry: Registry, folder: Path) -> None:
        self.now = 1_000_000.0
        self.on_look: Callable[[], None] = lambda: None
        disk = DiskFolder(str(folder), folder)
        self.files = FileStore(disk, 10**6, 10**6, lambda: self.now)
        self.batches = BatchStore(disk, self._look)
        self.worker = BatchWorker(registry, Settings(), disk, self.files, self.batches)

    def _look(self) -> float:
        self.on_look()
        return self.now

    def create(self, data: bytes, **fields: Any) -> str:
        given = self.files.create(io.BytesIO(data), "in.jsonl", "batch", "me")
        body = BatchBody(input_file_id=given.id, endpoint=TEXT, completion_window="1h", **fields)
        batch_id = self.batches.create(body, "me").id
        self.worker.wake()
        return batch_id

    def get(self, batch_id: str) -> BatchObject:
        found = self.batches.get(batch_id, "me")
        assert found is not None
        return found


def test_a_batch_that_takes_too_long_expires_and_tells_what_has_not_run(tmp_path: Path) -> None:
    with serving() as app:
        clocked = Clocked(app.registry, tmp_path)
        try:
            batch_id = clocked.create(make_file(3, make_line(9, TEXT, HANGS)))
            wait_until(lambda: clocked.get(batch_id).request_counts.completed == 3)
            clocked.now += 3600
            wait_until(lambda: clocked.get(batch_id).status == "expired")
            batch = clocked.get(batch_id)
            assert batch.expired_at == clocked.now and batch.error_file_id is not None
            (line,) = clocked.files.path_of(batch.error_file_id).read_text().splitlines()
            unrun = json.loads(line)
            assert (unrun["custom_id"], unrun["response"]) == ("line 9", None)
            assert unrun["error"]["code"] == "batch_expired"
            assert batch.request_counts.failed == 1
        finally:
            clocked.worker.close()


@pytest.mark.parametrize("at_look", range(1, 10))
def test_a_cancel_that_was_accepted_is_not_lost_whenever_it_comes(tmp_path: Path, at_look: int) -> None:
    """The worker reads the clock before each step of a batch; the cancel comes at one of these moments."""
    looks: list[None] = []
    told: list[str] = []

    def cancel() -> None:
        if threading.current_thread().name != "levserve-batches":
            return
        looks.append(None)
        if len(looks) == at_look and (stored := clocked.batches.first_open()) is not None:
            told.append(clocked.batches.cancel(stored.batch.id).status)

    with serving() as app:
        clocked = Clocked(app.registry, tmp_path)
        clocked.on_look = cancel
        try:
            batch_id = clocked.create(make_file(1))
            wait_until(lambda: clocked.get(batch_id).status in ENDED)
            wanted = "cancelled" if "cancelling" in told else "completed"
            assert clocked.get(batch_id).status == wanted
        finally:
            clocked.worker.close()


def test_files_go_when_they_have_expired_but_not_while_a_batch_reads_them(tmp_path: Path) -> None:
    with serving() as app:
        clocked = Clocked(app.registry, tmp_path)
        try:
            given = clocked.files.create(io.BytesIO(b"x"), "x", "batch", "me", 3600)
            batch_id = clocked.create(make_line(9, TEXT, HANGS))
            wait_until(lambda: clocked.get(batch_id).status == "in_progress")
            clocked.now += 3599
            assert clocked.files.get(given.id, "me") is not None
            clocked.now += 1
            assert clocked.files.get(given.id, "me") is None
            assert not clocked.files.path_of(given.id).exists()
            clocked.now += 40 * 86400
            input_id = clocked.get(batch_id).input_file_id
            if clocked.batches.uses_file(input_id):  # the worker may end the expired batch at any moment
                assert clocked.files.path_of(input_id).exists()
            wait_until(lambda: clocked.get(batch_id).status == "expired")
            clocked.now += 40 * 86400
            assert clocked.files.owned_by("me") == [] and clocked.batches.owned_by("me") == []
            assert list((tmp_path / "batches").iterdir()) == []
        finally:
            clocked.worker.close()


def test_a_batch_whose_file_is_lost_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    with serving() as app:
        clocked = Clocked(app.registry, tmp_path)
        try:
            hanging = clocked.create(make_line(9, TEXT, HANGS))
            lost, next_one = clocked.create(make_file(1)), clocked.create(make_file(2))
            clocked.files.path_of(clocked.get(lost).input_file_id).unlink()
            clocked.batches.cancel(hanging)
            wait_until(lambda: clocked.get(next_one).status == "completed")
            assert clocked.get(lost).status == "failed" and clocked.get(lost).errors is not None
        finally:
            clocked.worker.close()


def test_a_batch_that_fails_midway_leaves_no_results_that_nobody_can_read(tmp_path: Path) -> None:
    with serving() as app:
        clocked = Clocked(app.registry, tmp_path)
        try:
            batch_id = clocked.create(make_file(2, make_line(9, TEXT, HANGS)))
            wait_until(lambda: clocked.get(batch_id).request_counts.completed == 2)
            clocked.files.path_of(clocked.get(batch_id).input_file_id).unlink()
            clocked.now += 3601
            wait_until(lambda: clocked.get(batch_id).status == "failed")
            assert not [
                path
                for path in (tmp_path / "files").iterdir()
                if batch_id.removeprefix("batch_") in path.name
            ]
        finally:
            clocked.worker.close()


def test_of_very_many_batches_that_have_ended_the_oldest_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_ENDED", 2)
    disk = DiskFolder(str(tmp_path), tmp_path)
    batches = BatchStore(disk)
    body = BatchBody(input_file_id="file-1", endpoint=TEXT, completion_window="1h")
    made = [batches.create(body, "me").id for _ in range(4)]
    for batch_id in made[:3]:
        batches.change(batch_id, status="failed")
    assert [batch.id for batch in batches.owned_by("me")] == made[1:]
    assert {batch.id for batch in BatchStore(disk).owned_by("me")} == set(made[1:])


def test_a_server_without_a_folder_leaves_none_behind() -> None:
    with serving() as app:
        batch = create(app, make_file(2))
        wait_ended(app, batch["id"])
        worker: BatchWorker = app.client.application.extensions["levserve-batches"]
        folder = worker._disk.files
        assert folder.is_dir()
    assert not folder.parent.exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "levserve-batches"]


def test_a_system_without_temporary_folders_keeps_files_in_the_cache_until_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a read-only root has no other place."""

    def find_none() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", find_none)
    disk = DiskFolder("", tmp_path)
    disk.prepare()
    assert disk.files.is_dir() and tmp_path in disk.files.parents
    disk.close()
    assert not list(tmp_path.iterdir())
