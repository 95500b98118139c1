"""The store of responses: bounded, owned, thread-safe, and kept in files."""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from levserve.errors import StartupError
from levserve.web.responses.input_items import InputItem
from levserve.web.responses.state_folder import open_state_folder
from levserve.web.responses.store import MAX_AGE_SECONDS, ResponseStore

ITEMS = [InputItem(type="message", id="msg_1", role="user", content="hello")]


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def put(store: ResponseStore, response_id: str, owner: str = "me", text: str = "hi") -> None:
    content = [{"type": "output_text", "text": text}]
    output = [{"type": "message", "role": "assistant", "content": content}]
    store.put(response_id, owner, ITEMS, json.dumps({"id": response_id, "output": output}).encode())


def texts(store: ResponseStore, response_id: str, owner: str = "me") -> list[str] | None:
    found = store.get(response_id, owner)
    return None if found is None else [item.text for item in found.history]


def open_store(path: Path, max_responses: int = 10, max_bytes: int = 10**6) -> ResponseStore:
    return ResponseStore(max_responses, max_bytes, open_state_folder(str(path), "responses"))


def files(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "responses").iterdir())


def test_the_oldest_goes_first() -> None:
    store = ResponseStore(2, 10**6)
    for response_id in "abc":
        put(store, response_id)
    assert [texts(store, response_id) for response_id in "abc"] == [None, ["hello", "hi"], ["hello", "hi"]]


def test_bytes_are_bounded() -> None:
    store = ResponseStore(100, 5000)
    for number in range(20):
        put(store, str(number), text="x" * 1000)
    assert sum(texts(store, str(number)) is not None for number in range(20)) == 3


def test_a_response_that_is_larger_than_the_store_drives_out_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ResponseStore(100, 5000)
    put(store, "small")
    put(store, "large", text="x" * 6000)
    assert texts(store, "large") is None and texts(store, "small") is not None
    assert "large is not stored" in caplog.text


def test_what_is_deleted_makes_room() -> None:
    store = ResponseStore(2, 10**6)
    put(store, "a")
    put(store, "b")
    assert store.delete("b", "me") and not store.delete("b", "me")
    put(store, "c")
    assert texts(store, "a") and texts(store, "c")


def test_an_old_response_is_gone() -> None:
    clock = Clock()
    store = ResponseStore(10, 10**6, clock=clock)
    put(store, "a")
    clock.now += MAX_AGE_SECONDS + 1
    put(store, "b")
    assert texts(store, "a") is None and texts(store, "b") is not None


def test_another_owner_sees_nothing() -> None:
    store = ResponseStore(10, 10**6)
    put(store, "a", owner="me")
    assert texts(store, "a", owner="you") is None and texts(store, "a", owner="") is None
    assert not store.delete("a", "you") and texts(store, "a") is not None


def test_many_threads_keep_the_bounds(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_responses=20)

    def work(number: int) -> None:
        for step in range(20):
            put(store, f"{number}-{step}")
            store.get(f"{number}-{step}", "me")
            store.delete(f"{number}-{step - 1}", "me")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    left = [f"{number}-{step}" for number in range(8) for step in range(20)]
    found = [response_id for response_id in left if texts(store, response_id)]
    assert len(found) <= 20
    assert files(tmp_path) == sorted(f"{response_id}.json" for response_id in found)


class TestFiles:
    def test_outlive_the_store_and_keep_its_order(self, tmp_path: Path) -> None:
        first = open_store(tmp_path)
        for response_id in "abc":
            put(first, response_id)
        first.delete("b", "me")
        second = open_store(tmp_path, max_responses=2)
        assert texts(second, "a") and texts(second, "c") and texts(second, "b") is None
        put(second, "d")
        assert texts(second, "a") is None and files(tmp_path) == ["c.json", "d.json"]

    def test_belong_to_the_user_alone(self, tmp_path: Path) -> None:
        put(open_store(tmp_path), "a")
        assert (tmp_path / "responses" / "a.json").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "responses").stat().st_mode & 0o777 == 0o700

    def test_are_bounded_when_they_are_read(self, tmp_path: Path) -> None:
        first = open_store(tmp_path)
        for number, response_id in enumerate("abcd"):
            put(first, response_id)
            os.utime(tmp_path / "responses" / f"{response_id}.json", (number, number))
        second = open_store(tmp_path, max_responses=2)
        assert texts(second, "c") and texts(second, "d") and texts(second, "a") is None
        assert files(tmp_path) == ["c.json", "d.json"]

    def test_rubbish_is_skipped_and_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        put(open_store(tmp_path), "good")
        folder = tmp_path / "responses"
        whole = (folder / "good.json").read_bytes()
        (folder / "half.json").write_bytes(whole[:40])
        (folder / "other.json").write_bytes(whole)  # its name does not match its content
        (folder / "bytes.json").write_bytes(b"\xff\xfe")
        (folder / "deep.json").write_bytes(b"[" * 100_000)
        (folder / "empty.json").write_bytes(b"")
        (folder / "folder.json").mkdir()
        (folder / "notes.txt").write_text("mine")
        (folder / "left.part").write_bytes(whole)
        with caplog.at_level(logging.WARNING):
            store = open_store(tmp_path)
        assert texts(store, "good") == ["hello", "hi"]
        for name in ("half", "other", "bytes", "deep", "empty"):
            assert texts(store, name) is None and f"{name}.json" in caplog.text
        assert (folder / "notes.txt").exists() and not (folder / "left.part").exists()

    def test_a_folder_that_cannot_be_made_ends_the_start(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StartupError, match="--state-dir"):
            open_state_folder(str(tmp_path / "file"), "responses")

    def test_a_file_that_cannot_be_written_does_not_fail_the_request(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = open_store(tmp_path)
        (tmp_path / "responses").rmdir()
        put(store, "a")
        assert texts(store, "a") == ["hello", "hi"] and "a.json" in caplog.text
