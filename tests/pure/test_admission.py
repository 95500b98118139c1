"""Admission: exactly as many requests get in as fit.

The others are refused before any work and told when to retry. Also how long a request may take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levserve.engine.admission import BYTES_PER_TOKEN, MAX_RETRY_SECONDS, Admission
from levserve.errors import BadRequest, Overloaded
from levserve.observe.metrics import Metrics
from levserve.schedule.pace import Backlog, Pace
from tests.fake_app import App, serving
from tests.fake_server import ServerProcess, completion

LIMITS = ("limit-requests", "remaining-requests", "limit-tokens", "remaining-tokens")


def make(max_requests: int = 4, max_tokens: int = 100) -> Admission:
    return Admission(max_requests, max_tokens, Metrics())


def in_use(admission: Admission) -> tuple[int, int, int]:
    return admission._num_requests, admission._num_tokens, admission._num_guessed


def limits_of(headers: Any) -> list[int]:
    return [int(headers[f"x-ratelimit-{name}"]) for name in LIMITS]


# Small requests are limited by their number, large ones by their tokens.
@pytest.mark.parametrize("size, accepted", [(1, 8), (30, 3)])
def test_of_a_burst_of_three_times_the_limit_exactly_as_many_get_in_as_fit(size: int, accepted: int) -> None:
    admission = make(8, 100)
    start, leave = threading.Barrier(24), threading.Event()
    results: list[str] = []

    def enter() -> None:
        start.wait()
        try:
            with admission.reserve(body_bytes=2 * BYTES_PER_TOKEN, max_guess=50) as reservation:
                reservation.grow_to(1, size)
                results.append("in")
                leave.wait(20)
        except Overloaded as error:
            results.append(error.type)

    with ThreadPoolExecutor(24) as pool:
        for _ in range(24):
            pool.submit(enter)
        deadline = time.monotonic() + 20
        while len(results) < 24:
            assert time.monotonic() < deadline
        leave.set()
    assert results.count("in") == accepted
    assert set(results) == {"in", "requests" if size == 1 else "tokens"}
    assert in_use(admission) == (0, 0, 0)


class TestReservation:
    def test_gives_back_all_it_took_however_it_grew_and_however_often_it_is_released(self) -> None:
        admission = make()
        reservation = admission.reserve(160, max_guess=30)
        assert in_use(admission) == (1, 0, 20)
        reservation.grow_to(3, 0)
        assert in_use(admission) == (3, 0, 20)
        reservation.grow_to(2, 60)
        assert in_use(admission) == (3, 60, 0)
        with admission.reserve(0, 0) as other, pytest.raises(Overloaded):
            other.grow_to(1, 41)
        assert in_use(admission) == (3, 60, 0)
        reservation.release()
        reservation.release()
        assert in_use(admission) == (0, 0, 0)

    def test_a_guess_keeps_out_who_comes_later_but_not_who_has_counted(self) -> None:
        admission = make()
        one, other = admission.reserve(10**9, 20), admission.reserve(10**9, 10**9)
        assert in_use(admission) == (2, 0, 20 + 25)
        one.grow_to(1, 70)
        with pytest.raises(Overloaded):
            admission.reserve(6 * BYTES_PER_TOKEN, 60)
        with pytest.raises(Overloaded):
            other.grow_to(1, 31)
        other.grow_to(1, 30)
        assert in_use(admission) == (2, 100, 0)

    @pytest.mark.parametrize("requests, tokens, numbers", [(5, 0, ("5", "4")), (2, 101, ("101", "100"))])
    def test_what_never_fits_is_a_mistake_and_told_with_both_numbers(
        self, requests: int, tokens: int, numbers: tuple[str, str]
    ) -> None:
        with make().reserve(0, 0) as reservation, pytest.raises(BadRequest) as refused:
            reservation.grow_to(requests, tokens, "n")
        assert refused.value.param == "n" and all(number in refused.value.message for number in numbers)

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 120)), max_size=30))
    def test_counts_are_never_past_their_bounds_and_end_at_zero(
        self, steps: list[tuple[int, int, int]]
    ) -> None:
        admission = make()
        held = {}
        for who, requests, tokens in steps:
            try:
                if who not in held:
                    held[who] = admission.reserve(tokens * BYTES_PER_TOKEN, 40)
                elif tokens == 0:
                    held.pop(who).release()
                else:
                    held[who].grow_to(requests, tokens)
            except (BadRequest, Overloaded):
                pass
            num_requests, num_tokens, num_guessed = in_use(admission)
            assert 0 <= num_requests <= 4 and 0 <= num_tokens <= 100 and num_guessed >= 0
        for reservation in held.values():
            reservation.release()
        assert in_use(admission) == (0, 0, 0)


class TestPace:
    def test_costs_are_what_rounds_took_of_late(self) -> None:
        pace = Pace(prefill_token_seconds=5.0)  # a bad guess
        for _ in range(50):
            pace.note_round(100, 0, 0.2)
            pace.note_round(0, 4, 0.1)
        assert pace.prefill.token_seconds == pytest.approx(0.002, rel=0.5)
        assert pace.decode.token_seconds == pytest.approx(0.025, rel=0.5)
        for _ in range(2_000):
            pace.note_round(100, 0, 0.4)
            pace.note_round(0, 4, 0.05)
        assert pace.prefill.token_seconds == pytest.approx(0.004, rel=0.01)
        assert pace.seconds_for(Backlog(1_000, 80)) == pytest.approx(4 + 1, rel=0.01)

    def test_prompts_get_half_as_much_again_as_the_decoding_beside_them_and_no_more_than_streams_will_wait(
        self,
    ) -> None:
        pace = Pace(0.01, patience_seconds=0.1)
        assert pace.max_prefill(0.001, 4) == pytest.approx(100, abs=1) and not pace.knows_decoding
        for _ in range(20):
            pace.note_decoding(4, 0.02)
        assert pace.max_prefill(0.001, 4) == pytest.approx(30, abs=1) and pace.knows_decoding
        assert pace.max_prefill(0.00001, 4) == pytest.approx(3000, abs=1)
        for seconds, tokens in ((0.04, 45), (0.04, 52)):
            pace.note_decoding(4, seconds)  # decoding gets slower, as with longer contexts
            assert pace.max_prefill(0.001, 4) == pytest.approx(tokens, abs=1)
        for _ in range(20):
            pace.note_decoding(4, 0.5)
        assert pace.max_prefill(0.001, 4) == pytest.approx(100, abs=1)

    def test_prompts_get_a_share_of_a_step_with_all_who_will_be_streams(self) -> None:
        pace = Pace(0.01, patience_seconds=0.1)
        pace.note_decoding(4, 0.02)
        assert pace.max_prefill(0.001, 14) == pytest.approx(45, abs=1)
        assert pace.max_prefill(0.001, 2) == pytest.approx(27, abs=1), "others have ended"
        assert pace.max_prefill(0.001, 500) == pytest.approx(100, abs=1)
        pace.note_decoding(4, -5.0)  # the estimated time of the prompts was longer than the whole round
        assert pace.max_prefill(0.001, 4) == 0

    def test_a_round_of_both_kinds_is_shared_by_their_costs(self) -> None:
        pace = Pace(0.01)
        for _ in range(400):
            pace.note_round(0, 8, 0.16)
            pace.note_round(50, 8, 0.26)
        assert pace.decode.token_seconds == pytest.approx(0.02, rel=0.1)
        assert pace.prefill.token_seconds == pytest.approx(0.002, rel=0.3)

    def test_who_stops_early_shortens_what_is_expected(self) -> None:
        pace = Pace(0.01)
        before = pace.seconds_for(Backlog(0, 1_000))
        for _ in range(200):
            pace.note_end(num_generated=100, max_tokens=1_000)
        assert pace.seconds_for(Backlog(0, 1_000)) == pytest.approx(before / 10, rel=0.01)
        assert pace.expect(Backlog(0, 1_000, 500)).first_end_seconds == pytest.approx(before / 20, rel=0.01)
        pace.note_end(0, 0)

    @pytest.mark.parametrize(
        "drain, seconds",
        [(None, 1.0), (0.0, 1.0), (80.0, 20.0), (0.01, 0.05), (1e6, MAX_RETRY_SECONDS)],
    )
    def test_a_refusal_waits_for_its_share_of_the_work(self, drain: float | None, seconds: float) -> None:
        admission = make()
        admission.drain_seconds = drain
        held = [admission.reserve(0, 0) for _ in range(4)]
        with pytest.raises(Overloaded) as refused:
            admission.reserve(0, 0)
        assert refused.value.retry_after_seconds == seconds
        assert len(held) == 4

    def test_requests_that_are_refused_together_come_back_one_after_another(self) -> None:
        admission = make()
        admission.drain_seconds = 8.0
        held = [admission.reserve(0, 0) for _ in range(4)]

        def refuse() -> float:
            with pytest.raises(Overloaded) as refused:
                admission.reserve(0, 0)
            return refused.value.retry_after_seconds

        admission.first_end_seconds = 3.0  # before that no place is free
        assert [refuse() for _ in range(5)] == [3.0, 4.0, 6.0, 8.0, 8.0]
        held.pop().release()
        held.append(admission.reserve(0, 0))
        assert refuse() == 6.0
        for place in held:
            place.release()


class TestOverHttp:
    @pytest.fixture
    def app(self) -> Iterator[App]:
        with serving(max_inflight=2, max_tokens=60) as app:
            yield app

    def test_answers_tell_the_limits_and_what_is_left(self, app: App) -> None:
        assert limits_of(app.post("/v1/completions", completion("t17", max_tokens=9)).headers) == [
            2,
            2,
            60,
            60,
        ]
        body = completion("t17 t18", max_tokens=9, stream=True)
        stream = app.client.post("/v1/completions", json=body)
        assert limits_of(stream.headers) == [2, 1, 60, 49]
        stream.close()
        assert limits_of(app.post("/v1/chat/completions", {}).headers) == [2, 2, 60, 60]
        app.engine.admission.drain_seconds = 1.5
        headers = app.post("/v1/embeddings", {"model": "toy", "input": "t17"}).headers
        assert headers["x-ratelimit-reset-requests"] == headers["x-ratelimit-reset-tokens"] == "1500ms"
        assert "x-ratelimit-limit-requests" not in app.client.get("/v1/models").headers

    def test_a_full_server_refuses_before_it_looks_at_the_body(self, app: App) -> None:
        app.engine.admission.drain_seconds = 7.0
        held = [app.engine.reserve() for _ in range(2)]
        waits = []
        for path in (
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/embeddings",
            "/loglikelihood",
            "/generate",
            "/generate_stream",
        ):
            reply = app.client.post(path, data=b"no JSON", content_type="application/json")
            assert reply.status_code == 429 and reply.json is not None
            assert (reply.json["error"]["type"], reply.json["error"]["code"]) == (
                "requests",
                "rate_limit_exceeded",
            )
            waits.append((reply.headers["retry-after"], reply.headers["retry-after-ms"]))
            assert limits_of(reply.headers) == [2, 0, 60, 60]
        assert waits == [("4", "3500")] + 5 * [("7", "7000")]
        for one in held:
            one.release()
        assert (
            app.client.post("/v1/completions", data=b"no JSON", content_type="application/json").status_code
            == 400
        )

    def test_tokens_have_a_bound_of_their_own(self, app: App) -> None:
        held = app.engine.reserve()
        held.grow_to(1, 40)
        reply = app.post("/v1/completions", completion("t17", max_tokens=20))
        assert reply.status_code == 429 and reply.json is not None and reply.json["error"]["type"] == "tokens"
        assert app.post("/v1/completions", completion("t17", max_tokens=19)).status_code == 200
        held.release()
        never = app.post("/v1/completions", completion("t17", max_tokens=30, n=2))
        assert (
            never.status_code == 400
            and never.json is not None
            and never.json["error"]["param"] == "max_tokens"
        )
        assert (
            "62 tokens" in never.json["error"]["message"] and "60 at a time" in never.json["error"]["message"]
        )
        assert (
            app.engine.metrics.registry.get_sample_value("levserve_refused_total", {"reason": "tokens_full"})
            == 1
        )

    def test_many_prompts_that_only_compute_take_turns_under_both_bounds(self, app: App) -> None:
        texts = ["t17 " * length for length in (3, 30, 1, 5, 40, 2, 2, 2)]
        reply = app.post("/v1/embeddings", {"model": "toy", "input": texts})
        assert reply.status_code == 200 and reply.json is not None and len(reply.json["data"]) == 8
        assert limits_of(reply.headers) == [2, 2, 60, 60]
        assert app.post("/v1/embeddings", {"model": "toy", "input": "t17 " * 61}).status_code == 400

    def test_too_many_prompts_are_refused_before_they_are_tokenized(
        self, app: App, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(app.registry.default.tokenizer), "encode", lambda *_, **__: 1 / 0)
        assert app.refuse("/v1/completions", completion(["t17"] * 100_000)) == (400, "prompt")


@pytest.fixture(scope="module")
def patient() -> Iterator[App]:
    with serving(request_timeout=30) as app:
        yield app


class TestDeadline:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("by", ["header", "field"])
    def test_a_client_brings_one_in_a_header_or_a_field_and_the_sooner_counts(
        self, patient: App, by: str, stream: bool
    ) -> None:
        later = {"timeout": 20.0} if by == "header" else {"timeout": 0.05}
        headers = {"x-request-timeout-ms": "50" if by == "header" else "20000"}
        queued = patient.client.post(
            "/v1/completions", json=completion("t4", stream=stream, **later), headers=headers
        )
        assert (queued.status_code, queued.headers["x-should-retry"]) == (504, "false")
        running = patient.client.post(
            "/v1/completions", json=completion("t6", stream=stream, **later), headers=headers
        )
        assert running.status_code == 200
        assert '"finish_reason":"length","stop_reason":"deadline"' in running.text and " t7" in running.text

    @pytest.mark.parametrize(
        "path", ["/v1/embeddings", "/loglikelihood", "/generate", "/generate_stream", "/v1/chat/completions"]
    )
    def test_every_endpoint_that_runs_the_model_knows_them(self, patient: App, path: str) -> None:
        body: dict[str, Any] = {
            "/v1/embeddings": {"model": "toy", "input": "t4"},
            "/loglikelihood": {"prompts": ["t4"], "continuations": [" t17"]},
            "/v1/chat/completions": {"model": "toy", "messages": [{"role": "user", "content": "t4"}]},
        }.get(path, {"prompts": ["t4"], "max_tokens": 9})
        assert patient.client.post(path, json=body, headers={"x-request-timeout-ms": "30"}).status_code == 504
        assert patient.client.post(path, json=body | {"timeout": 0.03}).status_code == 504
        assert patient.refuse(path, body | {"timeout": 0}) == (400, "timeout")

    def test_one_that_is_as_good_as_none_is_none(self) -> None:
        with serving(request_timeout=0) as app:
            headers = {"x-request-timeout-ms": "1e300"}
            assert (
                app.client.post(
                    "/v1/completions", json=completion("t17", timeout=1e300), headers=headers
                ).status_code
                == 200
            )

    def test_a_script_is_told_the_reason_itself(self, patient: App) -> None:
        reply = patient.post(
            "/generate", {"prompts": ["t6"], "max_tokens": 9, "timeout": 0.05, "temperature": 0}
        )
        assert reply.json is not None and reply.json["finish_reasons"] == ["deadline"]

    @pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "1e999", "9" * 5000])
    def test_a_header_that_is_no_time_is_refused_by_name(self, patient: App, value: str) -> None:
        reply = patient.client.post(
            "/v1/completions", json=completion("t17"), headers={"x-request-timeout-ms": value}
        )
        assert reply.status_code == 400 and reply.json is not None
        assert reply.json["error"]["param"] == "x-request-timeout-ms"


def test_the_sdk_waits_as_long_as_it_is_told_and_then_gets_in() -> None:
    with ServerProcess("--max-running", "1", "--max-waiting", "1").wait_ready() as server:
        held = server.start_completion("t4", n=2)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=4) as client:
            timer = threading.Timer(0.3, held.close)
            timer.start()
            began = time.monotonic()
            answer = client.completions.create(model="toy", prompt="t17", max_tokens=1, temperature=0)
            assert time.monotonic() - began >= 1.0, "the server has measured nothing yet and says a second"
            timer.join()
        assert answer.choices[0].text == " t18"
