"""lm-evaluation-harness on tasks of a few lines: against a live server with its remote tokenizer, and with
the model `levserve`.

The first is slow: it makes a virtual environment of its own and installs lm-eval there; run it with
`pytest -m slow`. The others are left out where lm-eval is not installed beside levserve.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tests.engines import cache_folder
from tests.servers import running_server
from tests.tiny.test_decoder import load, run_in_chunks

Samples = dict[str, list[dict[str, Any]]]
DOCUMENTS: list[dict[str, Any]] = [
    {"question": "t10 t11 t12", "choices": ["t13 t14", "t20", "t30 t31 t32"], "answer": 1},
    {"question": "t40 t41", "choices": ["t42", "t81 t305", "t99"], "answer": 0},
    {"question": "t275", "choices": ["t81 t305", "t9", "t8 t7"], "answer": 0},
]
TASKS = {
    "lev_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "lev_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["t999"], "max_gen_toks": 6, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Rome", "Paris", "Cairo", "Tokyo"], "answer": 1},
    {"question": "The capital of Japan is", "choices": ["Rome", "Paris", "Cairo", "Tokyo"], "answer": 3},
    {"question": "The sun rises in the", "choices": ["east", "kitchen", "book", "seven"], "answer": 0},
    {"question": "Two plus two is", "choices": ["green", "a cat", "four", "Monday"], "answer": 2},
]
CAPITALS = {"lev_capitals": TASKS["lev_choice"]}
# What `levserve eval` does, for users whose own command wraps lm_eval's.
IMPORT_AND_EVALUATE = (
    "import levserve.evaluation.harness; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
)


def tokens_of(text: str) -> list[int]:
    return [int(word.removeprefix("t")) for word in text.split()]


def logprobs_after(tokens: list[int]) -> np.ndarray:
    model, _ = load("llama")
    return run_in_chunks(model, tokens, chunk=128, page_size=4)


def loglikelihood(question: str, choice: str) -> float:
    context, tokens = tokens_of(question), tokens_of(f"{question} {choice}")
    logprobs = logprobs_after(tokens)
    return float(sum(logprobs[index - 1, tokens[index]] for index in range(len(context), len(tokens))))


def continue_greedily(question: str, count: int) -> str:
    tokens = tokens_of(question)
    for _ in range(count):
        tokens.append(int(logprobs_after(tokens)[-1].argmax()))
    return "".join(f" t{token}" for token in tokens[-count:])


def write_tasks(
    folder: Path, documents: list[dict[str, Any]] = DOCUMENTS, tasks: Mapping[str, Any] = TASKS
) -> None:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, task in tasks.items():
        shared = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(shared | task))  # JSON is YAML


def evaluate(url: str, folder: Path) -> Samples:
    """Evaluates a server."""
    write_tasks(folder)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([folder / "venv/bin/pip", "install", "-q", "lm-eval[api]>=0.4.9"], check=True)
    model = f"model=llama,base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=1,max_retries=1,max_length=250"
    command = [
        folder / "venv/bin/lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        model,
    ]
    return run_tasks(command, folder)


def run_tasks(
    command: Sequence[str | Path], folder: Path, tasks: Mapping[str, Any] = TASKS, output: str = "out"
) -> Samples:
    """The samples of each task as lm-eval logs them."""
    files = ["--include_path", folder, "--output_path", folder / output, "--log_samples"]
    subprocess.run([*command, "--tasks", ",".join(tasks), *files], check=True, cwd=folder)
    samples = {name: next((folder / output).rglob(f"samples_{name}_*.jsonl")) for name in tasks}
    return {
        name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in samples.items()
    }


def check_samples(samples: Samples) -> None:
    for document, sample in zip(DOCUMENTS, samples["lev_choice"], strict=True):
        got = [float(score) for ((score, _),) in sample["resps"]]
        wanted = [loglikelihood(document["question"], choice) for choice in document["choices"]]
        np.testing.assert_allclose(got, wanted, atol=1e-3)
        assert sample["acc"] == 1.0 and wanted.index(max(wanted)) == document["answer"]
    for document, sample in zip(DOCUMENTS, samples["lev_generate"], strict=True):
        assert sample["resps"] == [[continue_greedily(document["question"], 6)]]


@pytest.mark.slow
def test_lm_eval_gets_the_models_own_scores_and_text(tmp_path: Path) -> None:
    flags = (
        "--model",
        str(GOLDEN / "llama"),
        "--dtype",
        "float32",
        "--max-running",
        "4",
        "--prefill-chunk",
        "32",
    )
    with running_server(*flags) as server:
        samples = evaluate(server.url, tmp_path)
    check_samples(samples)


@pytest.mark.harness
def test_the_model_levserve_gets_them_without_a_server(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    settings = f"dtype=float32,max_running=4,prefill_chunk=32,cache_dir={cache_folder()}"
    model = f"pretrained={GOLDEN / 'llama'},{settings}"
    check_samples(run_tasks([sys.executable, "-m", "levserve", "eval", "--model_args", model], tmp_path))


@pytest.mark.harness
def test_both_commands_evaluate_the_bundled_model(bundled_gguf: Path, tmp_path: Path) -> None:
    write_tasks(tmp_path, QUESTIONS, CAPITALS)
    settings = f"pretrained={bundled_gguf},max_running=4,prefill_chunk=128,cache_dir={cache_folder()}"
    given = ["--model_args", settings]
    ours = [sys.executable, "-m", "levserve", "eval", *given]
    theirs = [sys.executable, "-c", IMPORT_AND_EVALUATE, "--model", "levserve", *given]
    found = run_tasks(ours, tmp_path, CAPITALS, "ours")["lev_capitals"]
    assert [sample["acc"] for sample in found] == [1.0] * len(QUESTIONS)
    again = run_tasks(theirs, tmp_path, CAPITALS, "theirs")["lev_capitals"]
    assert [sample["resps"] for sample in again] == [sample["resps"] for sample in found]
