"""What /v1/completions and chat can do beyond text: echo, prompt scores, `best_of`, timings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_app import App, serving
from tests.fake_server import completion

CHAT = {
    "model": "toy",
    "messages": [{"role": "user", "content": "t17 t18"}],
    "temperature": 0,
    "max_tokens": 1,
}


@pytest.fixture
def app() -> Iterator[App]:
    with serving() as app:
        yield app


class TestEcho:
    @pytest.mark.parametrize("prompt", ["t17 t18", [17, 18]])
    def test_shows_the_prompt_before_the_completion(self, app: App, prompt: Any) -> None:
        body = app.complete(prompt, echo=True, max_tokens=2)
        assert body["choices"][0]["text"] == "t17 t18 t19 t20"
        assert body["choices"][0]["logprobs"] is None
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 2)

    def test_shows_a_text_as_it_was_given_and_tokens_as_they_read(self, app: App) -> None:
        assert (
            app.complete("t17   </s> t18", echo=True, max_tokens=1)["choices"][0]["text"]
            == "t17   </s> t18 t19"
        )
        assert app.complete([17, 2, 18], echo=True, max_tokens=1)["choices"][0]["text"] == "t17 t18 t19"
        shown = app.complete([17, 2, 18], echo=True, max_tokens=1, skip_special_tokens=False)
        assert shown["choices"][0]["text"] == "t17 </s> t18 t19"

    def test_puts_the_prompt_into_the_first_chunk_of_each_choice(self, app: App) -> None:
        chunks = app.stream("/v1/completions", completion(["t17", "t30"], echo=True, max_tokens=2, n=2))
        texts: dict[int, list[str]] = {index: [] for index in range(4)}
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]].append(chunk["choices"][0]["text"])
        assert texts == {
            0: (first := ["t17 t18", " t19", ""]),
            1: first,
            2: (second := ["t30 t31", " t32", ""]),
            3: second,
        }

    def test_lists_the_prompts_tokens_before_the_generated_ones(self, app: App) -> None:
        logprobs = app.complete("t17 t19 t20 t24", echo=True, max_tokens=1, logprobs=1)["choices"][0][
            "logprobs"
        ]
        assert logprobs == {
            "tokens": ["t17", "t19", "t20", "t24", "t25"],
            "token_logprobs": [None, -1.5, -0.5, -9999.0, -0.5],
            "top_logprobs": [
                None,
                {"t18": -0.5, "t19": -1.5},
                {"t20": -0.5},
                {"t21": -0.5, "t24": -9999.0},
                {"t25": -0.5},
            ],
            "text_offset": [0, 3, 7, 11, 15],
        }

    def test_streams_the_same_lists(self, app: App) -> None:
        body = completion("t17 t19 t20 t24 t25 t26", echo=True, max_tokens=3, logprobs=2)
        whole = app.post("/v1/completions", body).json
        assert whole is not None
        pieces = [chunk["choices"][0]["logprobs"] for chunk in app.stream("/v1/completions", body)]
        assert len(pieces[0]["tokens"]) == 7, "the prompt comes with the first token"
        for name, wanted in whole["choices"][0]["logprobs"].items():
            assert [item for piece in pieces if piece is not None for item in piece[name]] == wanted

    def test_of_a_prompt_alone_is_pure_scoring(self, app: App) -> None:
        body = app.complete("t17 t18 t20", echo=True, max_tokens=0, logprobs=0)
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("t17 t18 t20", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -1.5]
        assert choice["logprobs"]["top_logprobs"] == [None, {"t18": -0.5}, {"t20": -1.5}]
        assert body["usage"]["completion_tokens"] == 0

    def test_of_a_prompt_of_one_token_has_one_null(self, app: App) -> None:
        logprobs = app.complete([17], echo=True, max_tokens=0, logprobs=5)["choices"][0]["logprobs"]
        assert (logprobs["token_logprobs"], logprobs["top_logprobs"], logprobs["text_offset"]) == (
            [None],
            [None],
            [0],
        )

    def test_scores_a_prompt_that_fills_the_context(self, app: App) -> None:
        prompt = list(range(9, 73))
        assert (
            app.complete(prompt, echo=True, max_tokens=0, logprobs=0)["choices"][0]["logprobs"][
                "token_logprobs"
            ][1:]
            == [-0.5] * 63
        )
        assert app.refuse("/v1/completions", completion(prompt, echo=True, max_tokens=1)) == (400, "prompt")

    def test_is_what_nothing_generated_needs(self, app: App) -> None:
        assert app.refuse("/v1/completions", completion("t17", max_tokens=0)) == (400, "max_tokens")
        assert app.refuse("/v1/completions", completion("t17", max_tokens=0, echo=False)) == (
            400,
            "max_tokens",
        )
        assert app.refuse("/v1/chat/completions", CHAT | {"max_tokens": 0}) == (400, "max_tokens")

    def test_finds_stop_strings_in_what_is_generated_only(self, app: App) -> None:
        choice = app.complete("t17 t18", echo=True, stop=["t18", "t20"], max_tokens=9)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("t17 t18 t19 ", "stop")


class TestHarness:
    """lm-evaluation-harness drops each list's last entry; a token with its map's maximum is greedy."""

    @staticmethod
    def parse(choice: Any, context_len: int) -> tuple[float, bool]:
        values = choice["logprobs"]["token_logprobs"][context_len:-1]
        tops = choice["logprobs"]["top_logprobs"][context_len:-1]
        return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))

    def test_reads_sums_and_greedy(self, app: App) -> None:
        prompts = [[17, 18, 19], [17, 18, 20], [17, 18]]
        body = app.complete(prompts, max_tokens=1, logprobs=1, echo=True, seed=1234)
        assert [self.parse(choice, 1) for choice in body["choices"]] == [
            (-1.0, True),
            (-2.0, False),
            (-0.5, True),
        ]

    @pytest.mark.parametrize("fields", [{}, {"stop_token_ids": [20]}])
    def test_reads_a_prompt_after_which_the_model_would_stop(self, app: App, fields: dict[str, Any]) -> None:
        last = 19 if fields else 1  # the next token is a stop token
        (choice,) = app.complete([[17, 18, last]], max_tokens=1, logprobs=1, echo=True, **fields)["choices"]
        assert len(choice["logprobs"]["tokens"]) == 4, (
            "the stop token is listed, so that dropping the last entry drops it"
        )
        assert choice["finish_reason"] == "stop"
        assert "t20" not in choice["text"]
        assert self.parse(choice, 2)[0] == (-0.5 if fields else -9999.0)

    def test_gets_no_stop_token_where_one_is_banned(self, app: App) -> None:
        (choice,) = app.complete(
            [[17, 18, 19]], max_tokens=2, min_tokens=1, stop_token_ids=[20], logprobs=1, echo=True
        )["choices"]
        assert (choice["logprobs"]["tokens"][3:], choice["finish_reason"]) == (["t20", "t21"], "length")


class TestPromptLogprobs:
    WANTED = [
        None,
        {
            "19": {"logprob": -1.5, "rank": None, "decoded_token": "t19"},
            "18": {"logprob": -0.5, "rank": 1, "decoded_token": "t18"},
        },
        {"20": {"logprob": -0.5, "rank": 1, "decoded_token": "t20"}},
    ]

    def test_stand_in_each_choice_of_a_completion(self, app: App) -> None:
        choices = app.complete(["t17 t19 t20", "t30"], prompt_logprobs=1, n=2, max_tokens=1)["choices"]
        assert [choice["prompt_logprobs"] for choice in choices] == [self.WANTED, self.WANTED, [None], [None]]
        assert [choice["logprobs"] for choice in choices] == [None] * 4
        assert sum(request.score_from is not None for request in app.device.requests) == 1, "computed once"

    def test_of_an_echo_are_computed_once_and_shown_in_every_choice(self, app: App) -> None:
        app.device.requests.clear()
        choices = app.complete("t17 t19 t20 t24 t25 t26 t27", echo=True, logprobs=1, n=3, max_tokens=1)[
            "choices"
        ]
        wanted = [None, -1.5, -0.5, -9999.0, -0.5, -0.5, -0.5]
        assert [choice["logprobs"]["token_logprobs"][:7] for choice in choices] == [wanted] * 3
        assert [request.score_from for request in app.device.requests] == [1, None, None]

    def test_stand_beside_the_choices_of_a_chat(self, app: App) -> None:
        body = app.post("/v1/chat/completions", CHAT | {"prompt_logprobs": 0, "n": 2}).json
        assert body is not None
        assert [list(entry) if entry else None for entry in body["prompt_logprobs"]] == [None, ["18"], ["9"]]
        assert body["prompt_logprobs"][2]["9"] == {"logprob": -9999.0, "rank": None, "decoded_token": "t9"}

    def test_and_shown_logprobs_have_numbers_of_their_own(self, app: App) -> None:
        choice = app.complete("t17 t18", prompt_logprobs=3, logprobs=1, max_tokens=1)["choices"][0]
        assert len(choice["prompt_logprobs"][1]) == 3
        assert choice["logprobs"]["top_logprobs"] == [{"t19": -0.5}]
        echoed = app.complete("t17 t18", prompt_logprobs=0, logprobs=2, max_tokens=1, echo=True)["choices"][0]
        assert len(echoed["prompt_logprobs"][1]) == 1
        assert len(echoed["logprobs"]["top_logprobs"][1]) == 2

    def test_are_not_streamed(self, app: App) -> None:
        assert app.refuse("/v1/completions", completion("t17", prompt_logprobs=1, stream=True)) == (
            400,
            "prompt_logprobs",
        )
        assert app.refuse("/v1/chat/completions", CHAT | {"prompt_logprobs": 1, "stream": True}) == (
            400,
            "prompt_logprobs",
        )


class TestSeeds:
    def test_equal_prompts_of_one_request_get_different_draws_the_same_on_repetition(self, app: App) -> None:
        def texts(*prompts: str, **fields: Any) -> list[str]:
            body = app.complete(list(prompts), seed=1, temperature=1, max_tokens=1, **fields)
            return [choice["text"] for choice in body["choices"]]

        assert texts("t17", "t17", "t17") == texts("t17", "t17", "t17") == [" t19", " t20", " t21"]
        assert texts("t17", "t17", n=2) == [" t19", " t20", " t21", " t22"]
        assert texts("t17") == [" t19"], "one prompt with one choice draws with the seed itself"

    def test_generate_draws_in_the_same_way(self, app: App) -> None:
        body = {"prompts": ["t17", "t17"], "seed": 1, "max_tokens": 1}
        reply = app.post("/generate", body).json
        assert reply is not None and reply["completions"] == [" t19", " t20"]


class TestBestOf:
    # Seeds 1 to 5 take steps of 2, 3, 4, 5 and 1. Steps of 1 are likely, of 2 less so, the others impossible.
    def test_returns_the_likeliest_sequences_first(self, app: App) -> None:
        body = app.complete("t17", best_of=5, n=2, seed=1, temperature=1, max_tokens=2)
        assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
            (0, " t18 t19"),
            (1, " t19 t21"),
        ]
        assert all(choice["logprobs"] is None for choice in body["choices"])
        assert body["usage"]["completion_tokens"] == 10, "what was not returned was computed all the same"

    def test_chooses_for_each_prompt(self, app: App) -> None:
        choices = app.complete(["t17", "t40"], best_of=3, seed=0, temperature=1, max_tokens=1, logprobs=0)[
            "choices"
        ]
        assert [(choice["index"], choice["text"]) for choice in choices] == [(0, " t18"), (1, " t41")]
        assert choices[0]["logprobs"]["token_logprobs"] == [-0.5]

    def test_is_at_least_n_and_not_streamed(self, app: App) -> None:
        assert app.refuse("/v1/completions", completion("t17", n=3, best_of=2)) == (400, "best_of")
        assert app.refuse("/v1/completions", completion("t17", best_of=2, stream=True)) == (400, "best_of")
        assert app.refuse("/v1/completions", completion("t17", best_of=9)) == (400, "best_of")
        assert len(app.stream("/v1/completions", completion("t17", best_of=2, n=2, max_tokens=1))) == 4


class TestTimings:
    NAMES = [
        "decode_ms",
        "first_token_ms",
        "prefill_ms",
        "prepare_ms",
        "queue_ms",
        "tokens_per_second",
        "total_ms",
    ]

    def test_come_only_when_asked_for(self, app: App) -> None:
        assert "timings" not in app.complete("t17")
        timings = app.complete("t17", timings=True)["timings"]
        assert sorted(timings) == self.NAMES
        assert 0 <= timings["prepare_ms"] <= timings["first_token_ms"] <= timings["total_ms"]
        assert timings["first_token_ms"] + timings["decode_ms"] == pytest.approx(
            timings["total_ms"], abs=0.01
        )
        assert timings["tokens_per_second"] > 0

    def test_of_a_prompt_alone_have_no_first_token(self, app: App) -> None:
        timings = app.complete("t17", echo=True, max_tokens=0, timings=True)["timings"]
        assert (timings["first_token_ms"], timings["decode_ms"], timings["tokens_per_second"]) == (
            None,
            0,
            None,
        )

    @pytest.mark.parametrize("options", [None, {"include_usage": True}])
    def test_of_a_stream_come_with_its_usage_at_the_end(self, app: App, options: Any) -> None:
        *chunks, last = app.stream(
            "/v1/chat/completions", CHAT | {"timings": True, "stream_options": options}
        )
        assert (last["choices"], sorted(last["timings"])) == ([], self.NAMES)
        assert last["usage"]["total_tokens"] == 4
        assert not any("timings" in chunk for chunk in chunks)

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_every_chunk_counts_if_asked(self, app: App, path: str) -> None:
        body = (CHAT if "chat" in path else completion("t17")) | {"max_tokens": 3}
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = app.stream(path, body | {"stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 3
        assert last["usage"] == chunks[-1]["usage"]
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
        silent = app.stream(path, body | {"stream_options": {"continuous_usage_stats": True}})
        assert not any("usage" in chunk for chunk in silent)

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/nowhere", "/healthz"])
    def test_every_answer_says_how_long_it_took(self, app: App, path: str) -> None:
        assert int(app.client.get(path).headers["openai-processing-ms"]) >= 0
        assert int(app.post(path, completion("t17", stream=True)).headers["openai-processing-ms"]) >= 0
