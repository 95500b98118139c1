"""A brain and a decoder in one real server: every endpoint, and the acceptance checklist of HRM serving."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.brains import brain_cases
from tests.conftest import GOLDEN, QUICK_COMPILE
from tests.forked_levserve import run_levserve
from tests.servers import Server, running_server
from tests.tiny.test_unloading import FLAGS as SMALL
from tests.torch_files import write_archive

MOE = "hrm-tiny-moe"
CASE = brain_cases(MOE)[0]
FLAGS = (*SMALL, "--max-waiting", "16")
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ini = tmp_path_factory.mktemp("brain") / "serve.ini"
    ini.write_text(
        f"[server]\nadmin-key = sesame\n"
        f"[model.brain]\nmodel = {GOLDEN / MOE / 'actv1_student.safetensors'}\nmax-seq-len = {MAX_TOKENS}\n"
        f"[model.llama]\nmodel = {GOLDEN / 'llama'}\n"
    )
    with running_server("--config", str(ini), *FLAGS, is_forked=True, **QUICK_COMPILE) as server:
        yield server


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "brain",
        "prompt": CASE["prompt"],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = server.call("/v1/completions", body | fields)
    assert reply.status == 200, reply.body
    answer: dict[str, Any] = reply.body
    return answer


def test_a_completion_is_the_references_text_with_its_log_probabilities(server: Server) -> None:
    answer = complete(server, logprobs=3, echo=True)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == CASE["greedy"]
    expected = CASE["prompt_logprobs"] + CASE["greedy_logprobs"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected[1:], abs=1e-3)
    assert (
        answer["usage"]["prompt_tokens"] == len(CASE["prompt"]) and answer["usage"]["completion_tokens"] == 24
    )


def test_a_stream_and_several_choices_are_what_one_answer_is(server: Server) -> None:
    body = {"model": "brain", "prompt": CASE["text"], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    whole = server.call("/v1/completions", body | {"n": 3}).body["choices"]
    assert len({choice["text"] for choice in whole}) == 1
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole[0]["text"]


def test_a_chat_without_a_template_is_the_last_user_message(server: Server) -> None:
    messages = [
        {"role": "system", "content": "t9 t9"},
        {"role": "user", "content": "t5 t5 t5"},
        {"role": "assistant", "content": "t7"},
        {"role": "user", "content": CASE["text"]},
    ]
    chat = {"model": "brain", "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    reply = server.call("/v1/chat/completions", chat)
    assert reply.status == 200, reply.body
    plain = complete(server, prompt=CASE["text"])["choices"][0]["text"]
    assert reply.body["choices"][0]["message"]["content"].split() == plain.split()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    refused = server.call("/v1/chat/completions", chat | {"tools": tools})
    assert refused.status == 400 and "cannot be given tools" in refused.body["error"]["message"]
    no_user = server.call("/v1/chat/completions", chat | {"messages": messages[:1]})
    assert no_user.status == 400 and "no message of a user" in no_user.body["error"]["message"]


def test_scores_are_the_chain_rules_unless_one_pass_is_asked_for(server: Server) -> None:
    words = " ".join(f"t{token}" for token in CASE["continuation"])
    body = {"model": "brain", "prompts": [CASE["text"]], "continuations": [" " + words], "details": True}
    chain = server.call("/loglikelihood", body).body
    assert chain["ll"] == pytest.approx([CASE["continuation_ll"]], abs=5e-3)
    assert chain["token_logprobs"][0] == pytest.approx(CASE["continuation_logprobs"], abs=1e-3)
    whole = server.call("/loglikelihood", body | {"mode": "one_pass"}).body
    assert whole["ll"] == pytest.approx([CASE["continuation_ll_one_pass"]], abs=5e-3)
    empty = server.call("/loglikelihood", body | {"mode": "one_pass", "prompts": [""]}).body
    assert len(empty["token_logprobs"][0]) == len(CASE["continuation"]) - 1, "the first has nothing before it"
    refused = server.call("/loglikelihood", body | {"model": "llama", "mode": "one_pass"})
    assert refused.status == 400 and "both directions" in refused.body["error"]["message"]
    unknown = server.call("/loglikelihood", body | {"mode": "twice"})
    assert unknown.status == 400 and unknown.body["error"]["param"] == "mode"


def test_embeddings_have_the_length_of_a_state(server: Server) -> None:
    reply = server.call("/v1/embeddings", {"model": "brain", "input": ["t5 t6", "t7"]})
    vectors = [entry["embedding"] for entry in reply.body["data"]]
    assert [len(vector) for vector in vectors] == [8, 8]
    assert sum(x * x for x in vectors[0]) == pytest.approx(1, abs=1e-5)


def test_a_token_without_a_row_is_refused(server: Server) -> None:
    """The tokenizer of this brain has 105 tokens, and its matrices have 97 rows."""
    for prompt in ("t5 <extra_99>", [3, 104]):
        reply = server.call("/v1/completions", {"model": "brain", "prompt": prompt, "max_tokens": 2})
        assert reply.status == 400 and "no weights for" in reply.body["error"]["message"]


def test_an_answer_can_be_held_to_some_tokens(server: Server) -> None:
    answer = complete(server, allowed_token_ids=[5, 7, 60], ignore_eos=False)
    assert len(answer["choices"][0]["token_ids"]) == 24 and set(answer["choices"][0]["token_ids"]) <= {
        5,
        7,
        60,
    }


def test_a_brain_and_a_decoder_answer_side_by_side(server: Server) -> None:
    case = json.loads((GOLDEN / "llama" / "golden.json").read_text())["cases"][0]

    def ask(number: int) -> bool:
        if number % 2:
            return bool(complete(server)["choices"][0]["token_ids"] == CASE["greedy"])
        answer = complete(server, model="llama", prompt=case["prompt"])
        return bool(answer["choices"][0]["token_ids"] == case["greedy"])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(16)))
    stats = {one["id"]: one for one in server.call("/admin/stats", key="sesame").body["models"]}
    assert stats["brain"]["kv_pages"] is None and stats["llama"]["kv_pages"] > 0


def test_new_weights_can_be_swapped_in(server: Server) -> None:
    reply = server.call("/admin/reload", {"name": "brain"}, key="sesame")
    assert reply.status == 200 and reply.body["max_logprob_difference"] == 0
    assert complete(server)["choices"][0]["token_ids"] == CASE["greedy"]


# The acceptance checklist


def test_sixteen_prompts_five_times_do_not_make_the_server_grow(server: Server) -> None:
    prompts = [f"t{number} t4" for number in range(3, 19)]
    body = {"prompts": prompts, "max_tokens": 16, "temperature": 0.7, "top_p": 0.9, "model": "brain"}
    sizes = []
    for _ in range(5):
        assert len(server.call("/generate", body).body["completions"]) == 16
        sizes.append(server.call("/admin/stats", key="sesame").body["memory"]["process_bytes"])
    assert sizes[-1] - sizes[1] < 64 << 20, sizes


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/generate", {"prompts": []}, "prompts"),
        ("/generate", {"prompts": ["t5"], "temperature": 3}, "temperature"),
        ("/generate", {"prompts": ["t5"], "top_p": 1.5}, "top_p"),
        ("/generate", {"prompts": ["t5"], "max_tokens": 600}, str(MAX_TOKENS)),
        ("/loglikelihood", {"prompts": ["t5"], "continuations": []}, "continuations"),
        ("/loglikelihood", {"prompts": ["t5", "t6"], "continuations": ["t7"]}, "continuations"),
    ],
)
def test_a_mistake_is_a_400_that_says_what_is_wrong(
    path: str, body: dict[str, Any], expected: str, server: Server
) -> None:
    reply = server.call(path, body | {"model": "brain"})
    assert reply.status == 400 and expected in reply.body["error"]["message"]


def test_work_beyond_the_queue_is_refused_with_429(server: Server) -> None:
    body = {"prompts": [f"t{number}" for number in range(3, 19)], "model": "brain", "temperature": 0}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.call, "/generate", body | {"max_tokens": 16}) for _ in range(4)]
        replies = [one.result() for one in asked]
    statuses = sorted(reply.status for reply in replies)
    assert statuses[0] == 200 and statuses[-1] == 429 and set(statuses) == {200, 429}
    refused = next(reply for reply in replies if reply.status == 429)
    assert float(refused.headers["Retry-After"]) > 0


def test_a_brain_is_ready_within_a_minute_answers_in_two_seconds_and_drains() -> None:
    """The server is compiled as users' servers are."""
    with running_server(
        "--model-path", str(GOLDEN / "hrm-tiny-dense-pt" / "actv1_student.pt"), *FLAGS, "--max-running", "2"
    ) as server:
        metrics = server.call("/metrics").body
        used = next(line for line in metrics.splitlines() if line.startswith("process_cpu_seconds_total"))
        assert float(used.split()[1]) < 60, "on a machine with nothing else to do it is ready in less time"
        assert server.call("/readyz").body["status"] == "ready"
        assert any("heads       2 (brain.json: arch.num_heads)" in line for line in server.lines)
        assert "levserve_kv_pages" not in metrics and "levserve_prefix_hit" not in metrics
        body = {"prompts": ["t5", "t6 t7 t8"], "max_tokens": 8, "temperature": 0.7, "top_p": 0.9}
        assert min(seconds_of(server, body) for _ in range(3)) < 2
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.call, "/generate", body | {"max_tokens": 40})
            while not server.metric("requests_running") and not asked.done():
                pass
            assert server.end(signal.SIGTERM) == 0
            assert asked.result().status == 200


def seconds_of(server: Server, body: dict[str, Any]) -> float:
    """The time that two prompts take; the best of a few counts, as the machine may be busy otherwise."""
    began = time.monotonic()
    assert len(server.call("/generate", body).body["completions"]) == 2
    return time.monotonic() - began


class Evil:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self._path)!r}, 'w')",)


def test_a_malicious_file_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    folder, marker = tmp_path / "brain", tmp_path / "ran"
    shutil.copytree(GOLDEN / "hrm-tiny-dense-pt", folder)
    write_archive(folder / "actv1_student.pt", pickle.dumps({"x": Evil(marker)}, protocol=2), {})
    ended = run_levserve(["--port", "0", "--model", str(folder)], os.environ, timeout=120)
    assert ended.returncode != 0 and "nothing was run" in ended.stderr and "Traceback" not in ended.stderr
    assert not marker.exists()
