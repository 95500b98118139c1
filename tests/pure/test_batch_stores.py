"""Batches that read from and write to stores: real client libraries against servers on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from levserve.batch import output as output_module
from levserve.batch.line import ResultLine, make_result
from levserve.batch.output import Output, open_output
from levserve.batch.source import Source
from levserve.errors import ConfigError, StartupError
from levserve.weights import store
from tests.stores import amazon_store, google_store, web_store

NUM_LINES = 30
MAX_BODY = 1000


@pytest.fixture(scope="module", params=["gs", "s3"])
def bucket(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    """The address of a bucket, and a filesystem on it."""
    with google_store() if request.param == "gs" else amazon_store() as files:
        files.pipe_file("models/in.jsonl", make_input())
        yield f"{request.param}://models", files


def make_input() -> bytes:
    return b"\n".join(json.dumps({"custom_id": f"{number}"}).encode() for number in range(NUM_LINES)) + b"\n."


def answer(output: Output, source: Source, most: int) -> int:
    """Writes results for up to `most` of the lines without one; returns how many it wrote."""
    count = 0
    for line in source.lines(MAX_BODY):
        if count < most and not output.done.has(line):
            output.write(make_result(line, "x", 200, b"{}"))
            count += 1
    return count


def test_an_input_comes_in_blocks(bucket: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BLOCK_BYTES", 100)
    source = Source(f"{bucket[0]}/in.jsonl")
    assert source.num_bytes == len(make_input())
    assert [line.data for line in source.lines(MAX_BODY)] == make_input().splitlines()


def test_results_end_in_the_store_and_a_later_run_goes_on(bucket: tuple[str, Any], tmp_path: Path) -> None:
    address, files = bucket
    place = f"{address}/{tmp_path.name}/out.jsonl"
    source = Source(f"{address}/in.jsonl")
    with open_output(place, tmp_path) as output:
        assert answer(output, source, 10) == 10
    with open_output(place, tmp_path) as output:
        assert answer(output, source, 1000) == NUM_LINES + 1 - 10
        output.finish()
    results = files.cat_file(place.partition("://")[2]).splitlines()
    assert len(results) == NUM_LINES + 1
    assert not list((tmp_path / "batch").iterdir())
    with open_output(place, tmp_path) as output:  # everything is done, as the stored object itself shows
        assert answer(output, source, 1000) == 0
        output.finish()
    assert files.cat_file(place.partition("://")[2]).splitlines() == results


def test_a_batch_goes_on_at_another_machine_from_the_parts_in_the_store(
    bucket: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "PART_BYTES", 1)
    address, files = bucket
    place = f"{address}/{tmp_path.name}/out.jsonl"
    source = Source(f"{address}/in.jsonl")
    with open_output(place, tmp_path / "one") as output:
        assert answer(output, source, 10) == 10
    parts = files.find(f"{place.partition('://')[2]}.parts")
    num_sent = sum(len(files.cat_file(part).splitlines()) for part in parts)
    assert 1 <= num_sent <= 10
    with open_output(place, tmp_path / "two") as output:
        assert output.results.num_results == num_sent
        assert answer(output, source, 1000) == NUM_LINES + 1 - num_sent
        output.finish()
    files.invalidate_cache()
    assert len(files.cat_file(place.partition("://")[2]).splitlines()) == NUM_LINES + 1
    assert not files.find(f"{place.partition('://')[2]}.parts")
    with open_output(place, tmp_path / "one", overwrites=True) as output:
        assert output.results.num_results == 0


def test_old_results_in_a_store_stay_until_the_first_new_one(bucket: tuple[str, Any], tmp_path: Path) -> None:
    address, _ = bucket
    place = f"{address}/{tmp_path.name}/out.jsonl"
    source = Source(f"{address}/in.jsonl")
    with open_output(place, tmp_path) as output:
        answer(output, source, 1000)
        output.finish()
    with open_output(place, tmp_path, overwrites=True):
        pass  # killed before it had a result
    with open_output(place, tmp_path) as output:
        assert output.results.num_results == NUM_LINES + 1
    with open_output(place, tmp_path, overwrites=True) as output:
        answer(output, source, 3)
    with open_output(place, tmp_path) as output:
        assert output.results.num_results == 3
    with open_output(place, tmp_path / "another machine") as output:
        assert 1 <= output.results.num_results <= 3


def test_what_is_not_there_or_cannot_be_written_is_one_line(bucket: tuple[str, Any], tmp_path: Path) -> None:
    address, _ = bucket
    with pytest.raises(ConfigError, match="no such file"):
        Source(f"{address}/nothing.jsonl")
    with web_store(tmp_path) as server:
        (tmp_path / "in.jsonl").write_bytes(make_input())
        assert len(list(Source(f"{server.address}/in.jsonl").lines(MAX_BODY))) == NUM_LINES + 1
        with pytest.raises(ConfigError, match="only gs:// and s3://"):
            open_output(f"{server.address}/out.jsonl", tmp_path / "cache")
    scheme = address.partition("://")[0]
    with pytest.raises(StartupError), open_output(f"{scheme}://no-such-bucket/out.jsonl", tmp_path) as output:
        answer(output, Source(f"{address}/in.jsonl"), 3)
        output.finish()


def test_a_result_is_a_line() -> None:
    assert (
        ResultLine("x", None, None).encode() == b'{"id":"x","custom_id":null,"response":null,"error":null}\n'
    )
