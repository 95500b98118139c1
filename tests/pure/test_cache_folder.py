"""Processes that make room in one cache at the same time do not disturb each other."""

from __future__ import annotations

import threading
from pathlib import Path

from levserve.weights.cache_folder import GONE, make_room

NUM_FILES, FILE_BYTES = 30, 8192
LIMIT_BYTES = 20_000
"""Less than two of the old folders, so that each process removes all of them."""


def test_several_that_make_room_at_once_all_succeed(tmp_path: Path) -> None:
    failures: list[Exception] = []

    def make(path: Path) -> None:
        try:
            make_room(path, 1000, LIMIT_BYTES)
        except Exception as error:
            failures.append(error)

    for round in range(10):
        root = tmp_path / str(round)
        for number in range(20):
            folder = root / f"old-{number}"
            folder.mkdir(parents=True)
            for file in range(NUM_FILES):
                (folder / str(file)).write_bytes(bytes(FILE_BYTES))
        new = [root / f"new-{number}" for number in range(3)]
        for path in new:
            path.mkdir()
        threads = [threading.Thread(target=make, args=(path,)) for path in new]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert not list(root.glob("old-*"))


def test_what_a_killed_process_was_removing_is_removed(tmp_path: Path) -> None:
    gone = tmp_path / f".model.12345678{GONE}"
    gone.mkdir()
    (gone / "weights").write_bytes(bytes(FILE_BYTES))
    (tmp_path / "new").mkdir()
    make_room(tmp_path / "new", 1000, LIMIT_BYTES)
    assert not gone.exists()
