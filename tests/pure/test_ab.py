"""bench/ab.py against fakes that answer in the shapes that OpenAI, TGI and llama.cpp document."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import ab
import ab_options
import difference
import kinds

from tests.documents import commands
from tests.fake_server import ServerProcess

SAID = [(" a", -0.5), (" b", -1.0), (" c", -1.5), (" d", -2.0)]
ALMOST = [(" a", -0.75), (" b", -1.0), (" x", -1.6), (" y", -2.0)]
"""Differs from SAID in the third token, at character 5 (counted from 0)."""


class Fake(ThreadingHTTPServer):
    """Gives the same answer to every question; `asked` has the path and body of each request."""

    daemon_threads = False

    def __init__(self, said: list[tuple[str, float]]) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.said = said
        self.has_logprobs = True
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The bodies of all requests but the first, which is the warm-up."""
        return [body for _, body in self.asked[1:]]


class FakeHandler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        self.send("application/json", json.dumps({"data": [{"id": "served"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self.server.keys.append(self.headers["Authorization"])
        events, whole = SHAPES[self.path](self.server, body)
        if body.get("stream") or self.path.endswith("/generate_stream"):
            self.send("text/event-stream", "".join(f"data:{event}\n\n" for event in events))
        else:
            self.send("application/json", json.dumps(whole))

    def send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


Shape = tuple[list[str], dict[str, Any]]


def as_openai(server: Fake, body: dict[str, Any]) -> Shape:
    def choice(pairs: list[tuple[str, float]], finish: str | None) -> dict[str, Any]:
        listed = {"tokens": [text for text, _ in pairs], "token_logprobs": [value for _, value in pairs]}
        text = "".join(text for text, _ in pairs)
        logprobs = listed if body.get("logprobs") and server.has_logprobs else None
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}

    usage = {"prompt_tokens": 5, "completion_tokens": len(server.said)}
    chunks = [{"choices": [choice([pair], None)], "usage": None} for pair in server.said]
    chunks += [{"choices": [choice([], "length")], "usage": None}, {"choices": [], "usage": usage}]
    events = [json.dumps({"id": "a"} | chunk) for chunk in chunks]
    return [*events, "[DONE]"], {"id": "a", "choices": [choice(server.said, "length")], "usage": usage}


def as_tgi(server: Fake, body: dict[str, Any]) -> Shape:
    """Refuses what TGI refuses, but with a 200: an error in the body must count as one too."""
    parameters = body["parameters"]
    if parameters.get("temperature", 1) <= 0 or parameters.get("top_p", 0.5) >= 1:
        error = {
            "error": "Input validation error: `temperature` must be strictly positive",
            "error_type": "validation",
        }
        return [json.dumps(error)], error
    tokens = [
        {"id": number, "text": text, "logprob": logprob, "special": False}
        for number, (text, logprob) in enumerate(server.said)
    ]
    tokens.append({"id": 0, "text": "</s>", "logprob": -0.1, "special": True})
    text = "".join(text for text, _ in server.said)
    details = {"finish_reason": "eos_token", "generated_tokens": len(tokens), "seed": None}
    events = [
        {"index": number, "token": token, "generated_text": None, "details": None}
        for number, token in enumerate(tokens, 1)
    ]
    events[-1] |= {"generated_text": text, "details": details | {"input_length": 6}}
    whole = {"generated_text": text, "details": details | {"prefill": [], "tokens": tokens}}
    return [json.dumps(event) for event in events], whole


def as_llama_cpp(server: Fake, body: dict[str, Any]) -> Shape:
    def probabilities(pairs: list[tuple[str, float]]) -> dict[str, Any]:
        if not body["n_probs"]:
            return {}
        listed = [
            {"id": 1, "token": text, "bytes": [], "logprob": logprob, "top_logprobs": []}
            for text, logprob in pairs
        ]
        return {"completion_probabilities": listed}

    end = {"stop": True, "stop_type": "limit", "tokens_predicted": len(server.said), "tokens_evaluated": 5}
    events = [
        {"content": text, "tokens": [1], "stop": False} | probabilities([(text, logprob)])
        for text, logprob in server.said
    ]
    text = "".join(text for text, _ in server.said)
    whole = {"content": text, **end} | probabilities(server.said)
    return [json.dumps(event) for event in [*events, {"content": "", **end}]], whole


SHAPES: dict[str, Callable[[Fake, dict[str, Any]], Shape]] = {
    "/v1/completions": as_openai,
    "/generate": as_tgi,
    "/generate_stream": as_tgi,
    "/completion": as_llama_cpp,
}


@contextmanager
def running(said: list[tuple[str, float]]) -> Iterator[Fake]:
    fake = Fake(said)
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        fake.shutdown()
        fake.server_close()
        thread.join()


@pytest.fixture
def first() -> Iterator[Fake]:
    with running(SAID) as fake:
        yield fake


@pytest.fixture
def other() -> Iterator[Fake]:
    with running(ALMOST) as fake:
        yield fake


def run(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    code = ab.main([*flags, "--json", str(tmp_path / "ab.json")])
    return code, json.loads((tmp_path / "ab.json").read_text())


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
@pytest.mark.parametrize("kind", list(kinds.KINDS))
def test_every_kind_of_server_is_compared_with_levserve(
    kind: str, stream: str, first: Fake, other: Fake, tmp_path: Path
) -> None:
    code, result = run(
        tmp_path, f"levserve={first.url}", f"b:{kind}={other.url}", "--num-prompts", "2", stream
    )
    summary = result["summary"]["b"]
    assert (code, summary["compared"], summary["same"], summary["failed"]) == (0, 2, 0, 0)
    assert summary["median_first_difference_chars"] == 5
    assert summary["logprob_difference"] == {"tokens": 4, "mean": 0.125, "max": 0.25}
    question = result["questions"][0]
    assert [answer["text"] for answer in question["answers"]] == [" a b c d", " a b x y"]
    assert question["differences"][1]["at_token"] == 2
    times = summary["latency_ms"]
    assert times["request"]["mean"] > 0
    assert bool(times["TTFT"]) == bool(times["inter-token"]) == (stream == "--stream")


def test_servers_that_say_the_same_are_the_same(first: Fake, tmp_path: Path) -> None:
    servers = [f"levserve={first.url}", f"tgi={first.url}", f"llama.cpp={first.url}"]
    code, result = run(tmp_path, *servers)
    assert code == 0
    for name in ("tgi", "llama.cpp"):
        assert (
            result["summary"][name]["same"] == result["summary"][name]["compared"] == len(result["questions"])
        )
        assert result["summary"][name]["logprob_difference"]["max"] == 0


def test_fields_are_spelled_as_each_server_names_them(first: Fake, tmp_path: Path) -> None:
    servers = [f"{kind}={first.url}" for kind in ("levserve", "tgi", "llama.cpp", "openai")]
    flags = ["--prompt", "hi", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--seeds", "3"]
    code, _ = run(tmp_path, *servers, *flags, "--stop", "END", "--max-tokens", "9", "--ignore-eos")
    assert code == 0
    bodies = dict(first.asked)
    shared = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["END"]}
    openai = {"prompt": "hi", "max_tokens": 9, "model": "served", "logprobs": 1, **shared}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    levserve = next(
        body for path, body in first.asked if body.get("ignore_eos") and path == "/v1/completions"
    )
    assert levserve == {**openai, **streamed, "top_k": 7, "ignore_eos": True}
    assert bodies["/v1/completions"] == {**openai, **streamed}
    parameters = {"max_new_tokens": 9, "do_sample": True, "details": True, "top_k": 7, **shared}
    assert bodies["/generate_stream"] == {"inputs": "hi", "parameters": parameters}
    own = {"n_predict": 9, "n_probs": 1, "top_k": 7, "min_p": 0.0, "repeat_penalty": 1.0, "ignore_eos": True}
    assert bodies["/completion"] == {"prompt": "hi", "stream": True, **own, **shared}


def test_greedy_is_spelled_so_that_tgi_takes_it_and_llama_cpp_adds_no_sampler(
    first: Fake, tmp_path: Path
) -> None:
    code, _ = run(tmp_path, f"tgi={first.url}", f"llama.cpp={first.url}", "--prompt", "hi")
    assert code == 0
    bodies = dict(first.asked)
    assert bodies["/generate_stream"]["parameters"] == {
        "max_new_tokens": 64,
        "do_sample": False,
        "seed": 0,
        "details": True,
    }
    assert (bodies["/completion"]["temperature"], bodies["/completion"]["top_k"]) == (0, 0)


def test_every_prompt_is_asked_with_every_seed(first: Fake, tmp_path: Path) -> None:
    code, result = run(
        tmp_path,
        f"levserve={first.url}",
        f"levserve={first.url}",
        "--seeds",
        "1,2",
        "--prompt",
        "a",
        "--prompt",
        "b",
    )
    asked = [(question["ask"]["prompt"], question["ask"]["seed"]) for question in result["questions"]]
    assert code == 0 and asked == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert [server["name"] for server in result["servers"]] == ["levserve", "levserve 2"]


def test_table_and_texts_show_where_answers_part(
    first: Fake, other: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, f"levserve={first.url}", f"vllm={other.url}", f"tgi={first.url}", "--prompt", "hi")
    shown = capsys.readouterr().out
    assert "same text as levserve | - | 0 of 1 | 1 of 1" in " ".join(
        shown.replace("|", " | ").split()
    ).replace("| |", "|")
    assert "vllm     x ' a b x y'" in shown and "tgi      = ' a b c d'" in shown
    assert "parts at character 5, token 2: ' c d' (-1.50) against ' x y' (-1.60)" in shown
    assert "tgi counts other prompt tokens than levserve (6 and 5 in the first such prompt)" in shown


def test_server_without_log_probabilities_is_compared_by_text_alone(
    first: Fake, other: Fake, tmp_path: Path
) -> None:
    other.has_logprobs = False
    code, result = run(tmp_path, f"levserve={first.url}", f"vllm={other.url}", "--prompt", "hi")
    assert code == 0
    assert result["summary"]["vllm"]["logprob_difference"] == {"tokens": 0, "mean": None, "max": None}
    assert result["questions"][0]["differences"][1]["at_token"] is None
    assert "vllm gives no log-probabilities" in result["notes"]


def test_failing_server_is_named_and_fails_the_run(first: Fake, tmp_path: Path) -> None:
    SHAPES["/broken/generate_stream"] = lambda *_: (['{"error": "out of memory"}'], {})
    try:
        code, result = run(tmp_path, f"levserve={first.url}", f"tgi={first.url}/broken", "--prompt", "hi")
    finally:
        del SHAPES["/broken/generate_stream"]
    assert code == 1 and result["summary"]["tgi"]["failed"] == 1
    assert 'tgi failed, first: error_event: "out of memory"' in result["notes"]
    assert result["questions"][0]["differences"] == [None, None]


def test_answer_of_another_kind_of_server_is_malformed(first: Fake, tmp_path: Path) -> None:
    SHAPES["/v2/completion"] = as_openai
    try:
        code, result = run(tmp_path, f"levserve={first.url}", f"llama.cpp={first.url}/v2", "--prompt", "hi")
    finally:
        del SHAPES["/v2/completion"]
    assert code == 1 and "not what llama.cpp answers" in result["notes"][0]


def test_server_that_is_not_there_fails_with_one_line(first: Fake, tmp_path: Path) -> None:
    with running(SAID) as gone:
        url = gone.url
    code, result = run(tmp_path, f"levserve={first.url}", f"tgi={url}", "--prompt", "hi")
    assert code == 1 and "refused" in result["notes"][0]
    with pytest.raises(SystemExit, match="ab.py: vllm: .* names no model"):
        run(tmp_path, f"levserve={first.url}", f"vllm={url}")


def test_model_and_key_go_to_the_server_they_are_for(first: Fake, other: Fake, tmp_path: Path) -> None:
    flags = ["--model", "b=mine", "--api-key", "b=secret", "--prompt", "hi"]
    _, result = run(tmp_path, f"a:levserve={first.url}", f"b:vllm={other.url}/v1", *flags)
    assert {body["model"] for body in other.bodies} == {"mine"} and set(other.keys) == {"Bearer secret"}
    assert {body["model"] for body in first.bodies} == {"served"} and set(first.keys) == {None}
    assert "secret" not in json.dumps(result)


def test_servers_take_turns_at_being_first(first: Fake, other: Fake, tmp_path: Path) -> None:
    run(tmp_path, f"levserve={first.url}", f"vllm={first.url}", "--prompt", "one", "--prompt", "two")
    fields = [body["prompt"] for body in (body for _, body in first.asked)]
    assert fields == ["Hello", "Hello", "one", "one", "two", "two"]
    with running(SAID) as tgi:
        SHAPES["/b/generate_stream"] = SHAPES["/a/generate_stream"] = as_tgi
        run(tmp_path, f"tgi={tgi.url}/a", f"tgi={tgi.url}/b", "--prompt", "one", "--prompt", "two")
        assert [path[1] for path, _ in tgi.asked] == ["a", "b", "a", "b", "b", "a"]
    del SHAPES["/b/generate_stream"], SHAPES["/a/generate_stream"]


def test_dataset_gives_the_prompts(first: Fake, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n')
    _, result = run(
        tmp_path, f"levserve={first.url}", f"vllm={first.url}", "--dataset", str(path), "--num-prompts", "2"
    )
    assert [question["ask"]["prompt"] for question in result["questions"]] == ["one", "two"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["levserve=http://x"], "at least two"),
        (["levserve=http://x", "ollama=http://y"], "KIND one of levserve"),
        (["levserve=http://x", "vllm=y:8000"], "does not start with http"),
        (["levserve=http://x", "http://y"], "write [NAME:]KIND=URL"),
        (["levserve=http://x", "vllm=http://y", "--model", "tgi=m"], "NAME one of levserve, vllm"),
        (["levserve=http://x", "vllm=http://y", "--top-p", "0"], "--top-p"),
        (["levserve=http://x", "vllm=http://y", "--seeds", "-1"], "--seeds"),
        (["levserve=http://x", "vllm=http://y", "--max-tokens", "0"], "--max-tokens"),
        (["levserve=http://x", "vllm=http://y", "--json", "/no/such/x"], "--json"),
        (["levserve=http://x", "vllm=http://y", "--dataset", "/no/such"], "--dataset"),
    ],
)
def test_wrong_usage_says_what_to_write(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        ab.main(flags)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_shorter_answer_parts_at_its_end() -> None:
    shorter = difference.Answer(" a b", tuple(kinds.Token(*pair) for pair in SAID[:2]), "stop")
    longer = difference.Answer(" a b c", tuple(kinds.Token(*pair) for pair in SAID[:3]), "length")
    found = difference.find_difference(longer, shorter)
    assert (found.at_char, found.at_token, found.other) == (4, 2, "the end (stop)")


def test_two_levserve_servers_say_the_same(tmp_path: Path) -> None:
    """The fake device continues token k with k + 1, so that the answers can be worked out by hand."""
    with ServerProcess("--max-running", "2") as one, ServerProcess("--max-running", "2") as two:
        servers = [f"levserve={process.wait_ready().url}" for process in (one, two)]
        code, result = run(tmp_path, *servers, "--prompt", "t17 t18", "--max-tokens", "4")
    assert code == 0 and result["summary"]["levserve 2"]["same"] == 1
    assert result["questions"][0]["answers"][0]["text"] == " t19 t20 t21 t22"
    assert result["summary"]["levserve 2"]["logprob_difference"]["tokens"] == 4


def test_every_command_that_is_written_down_can_be_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = commands("ab.py", ab_options.EPILOG)
    assert len(written) > 4
    for flags in written:
        assert len(ab_options.parse(flags, "").servers) >= 2
