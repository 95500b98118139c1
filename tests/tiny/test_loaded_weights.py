"""`load_weights` replaces the weights of an open model from memory, as a training loop that samples does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from levserve.api.model import Model
from levserve.errors import BadRequest, Poisoned, StartupError
from levserve.model.config import ModelConfig
from levserve.model.quantize import NARROW, choose_quantization
from levserve.model.select import choose_backend
from levserve.models.describe import in_order
from levserve.models.load import resident_of
from levserve.settings.settings import Settings
from levserve.weights.checkpoint import convert_tensors, read_arrays, read_config
from levserve.weights.memory_tensors import tensors_in_memory
from tests.adapters import ALPHA, LLAMA, RANK, make_halves, merge, write_adapter
from tests.conftest import FAMILIES, GOLDEN
from tests.engines import Running, running_engine
from tests.waiting import wait_until

FOLDER = GOLDEN / "llama"
CASES = json.loads((FOLDER / "golden.json").read_text())["cases"]
NAME = "model.layers.0.self_attn.q_proj.weight"
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    # The sizes of other tests, so that their programs are found.
    with running_engine(FOLDER, "--page-size", "4", "--prefill-chunk", "16") as running:
        yield running


@pytest.fixture(scope="module")
def model(running: Running) -> Model:
    return Model(running.registry, Settings())


@pytest.fixture
def arrays() -> Arrays:
    return read_folder(FOLDER)


@pytest.fixture(scope="module")
def changed() -> Arrays:
    """Other weights of the same model: layers and rows have changed places."""
    arrays = read_folder(FOLDER)
    swapped = {name.replace("layers.0.", "layers.x."): array for name, array in arrays.items()}
    swapped = {name.replace("layers.1.", "layers.0."): array for name, array in swapped.items()}
    swapped = {name.replace("layers.x.", "layers.1."): array for name, array in swapped.items()}
    swapped["model.embed_tokens.weight"] = np.roll(swapped["model.embed_tokens.weight"], 3, axis=0)
    return swapped


def read_folder(folder: Path) -> Arrays:
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


def greedy(model: Model, prompt: list[int], **fields: Any) -> list[int]:
    (result,) = model.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True, **fields)
    return list(result.tokens)


def test_new_weights_serve_and_the_old_ones_come_back(
    model: Model, arrays: Arrays, changed: Arrays, tmp_path: Path
) -> None:
    save_file(changed, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (FOLDER / name).exists():
            (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    with running_engine(tmp_path, "--page-size", "4", "--prefill-chunk", "16") as other:
        wanted = [greedy(Model(other.registry, Settings()), case["prompt"]) for case in CASES]
    told = model.load_weights(changed)
    assert [greedy(model, case["prompt"]) for case in CASES] == wanted
    assert wanted != [case["greedy"] for case in CASES]
    assert told.seconds >= told.swap_seconds > 0 and told.mean_logprob != told.mean_logprob_before
    model.load_weights({name: jnp.asarray(array) for name, array in arrays.items()})
    assert [greedy(model, case["prompt"]) for case in CASES] == [case["greedy"] for case in CASES]


def test_weights_whose_results_are_not_finite_are_told_apart_and_can_be_replaced(
    model: Model, arrays: Arrays, tmp_path: Path
) -> None:
    grown = {"model.embed_tokens.weight": 1e15, "model.norm.weight": 1e30}
    overflowing = arrays | {name: arrays[name] * np.float32(factor) for name, factor in grown.items()}
    for _ in range(2):
        with pytest.raises(Poisoned, match="The weights compute values that are not finite"):
            model.load_weights(overflowing)
    assert model.load_weights(arrays).mean_logprob_before is None
    assert [greedy(model, case["prompt"]) for case in CASES] == [case["greedy"] for case in CASES]
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    save_file(overflowing, tmp_path / "model.safetensors")
    with (
        pytest.raises(StartupError, match="cannot be served: .* not finite"),
        running_engine(tmp_path, "--page-size", "4", "--prefill-chunk", "16"),
    ):
        pass


def test_an_adapter_answers_as_the_weights_that_it_is_merged_into(
    running: Running, model: Model, arrays: Arrays, tmp_path: Path
) -> None:
    halves = make_halves(arrays, LLAMA)
    adapter = write_adapter(tmp_path / "tuned", halves, base_model_name_or_path=str(FOLDER))
    reloader = resident_of(running.engine, running.loaded).reloader
    assert reloader is not None
    reloader.reload(model=str(adapter))
    found = [greedy(model, case["prompt"]) for case in CASES]
    model.load_weights(merge(arrays, halves, LLAMA, ALPHA / RANK))
    assert found == [greedy(model, case["prompt"]) for case in CASES]
    model.load_weights(arrays)
    assert found != [greedy(model, case["prompt"]) for case in CASES]


def test_nothing_is_compiled_and_no_prefix_stays(
    running: Running, model: Model, arrays: Arrays, changed: Arrays
) -> None:
    model.load_weights(changed)
    prompt = [number % 200 + 20 for number in range(40)]
    before = [running.metric("compiles_total", when=when) for when in ("starting", "serving")]
    (first,) = model.generate(prompt, max_tokens=2, temperature=0)
    (again,) = model.generate(prompt, max_tokens=2, temperature=0)
    model.load_weights(arrays)
    (after,) = model.generate(prompt, max_tokens=2, temperature=0)
    assert [running.metric("compiles_total", when=when) for when in ("starting", "serving")] == before
    assert (first.usage.cached_tokens, after.usage.cached_tokens) == (0, 0) and again.usage.cached_tokens > 0


def test_what_runs_ends_with_the_old_weights_and_what_comes_later_has_the_new_ones(
    model: Model, arrays: Arrays, changed: Arrays
) -> None:
    model.load_weights(arrays)
    long = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
    (wanted,) = model.generate(CASES[0]["prompt"], **long)  # type: ignore[arg-type]
    stream = model.stream(CASES[0]["prompt"], **long)  # type: ignore[arg-type]
    tokens = list(next(stream).tokens)
    swapping = threading.Thread(target=model.load_weights, args=(changed,))
    swapping.start()
    wait_until(lambda: model._runtime.queue._is_held_back or not swapping.is_alive())
    later = greedy(model, CASES[1]["prompt"])
    swapping.join()
    tokens += [token for piece in stream for token in piece.tokens]
    assert tokens == list(wanted.tokens)
    assert later == greedy(model, CASES[1]["prompt"]) != CASES[1]["greedy"]
    model.load_weights(arrays)


def wait_for_more(answers: list[tuple[int, list[int]]]) -> None:
    enough = len(answers) + 3
    wait_until(lambda: len(answers) >= enough)


def test_weights_are_swapped_again_and_again_while_answers_are_written(
    model: Model, arrays: Arrays, changed: Arrays
) -> None:
    prompts = [case["prompt"] for case in CASES[:3]]
    allowed: list[list[list[int]]] = [[], [], []]
    for given in (changed, arrays):
        model.load_weights(given)
        for index, prompt in enumerate(prompts):
            allowed[index].append(greedy(model, prompt))
    answers: list[tuple[int, list[int]]] = []
    is_over = threading.Event()

    def write(index: int) -> None:
        while not is_over.is_set():
            answers.append((index, greedy(model, prompts[index])))

    writers = [threading.Thread(target=write, args=(index,)) for index in range(3)]
    for writer in writers:
        writer.start()
    for given in (changed, arrays) * 3:
        told = model.load_weights(given)
        assert told.seconds >= told.swap_seconds > 0
        wait_for_more(answers)
    is_over.set()
    for writer in writers:
        writer.join()
    for index, tokens in answers:
        assert tokens in allowed[index]  # of the old weights or of the new ones, never of both
    for index in range(3):
        seen = [tokens for number, tokens in answers if number == index]
        assert all(one in seen for one in allowed[index])
    assert [greedy(model, prompt) for prompt in prompts] == [both[1] for both in allowed]


@pytest.mark.parametrize(
    "change, words",
    [
        ({NAME: None}, f"missing {NAME}"),
        ({"model.layers.7.x": np.zeros(3, np.float32)}, "unexpected model.layers.7.x"),
        ({NAME: np.zeros((3, 4), np.float32)}, rf"wrong shape: {NAME} is \[3, 4\], expected"),
        ({NAME: [1.0, 2.0]}, f"{NAME} is a list, and not an array of jax or NumPy"),
        ({NAME: np.zeros((64, 64), np.int32)}, f"{NAME} is stored as int32"),
        ({NAME: np.full((64, 64), np.nan, np.float32)}, f"{NAME} is corrupt: some values are not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    model: Model, arrays: Arrays, change: Arrays, words: str
) -> None:
    given = {name: value for name, value in (arrays | change).items() if value is not None}
    with pytest.raises(BadRequest, match=words):
        model.load_weights(given)
    assert greedy(model, CASES[0]["prompt"]) == CASES[0]["greedy"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_leaves_are_those_of_its_checkpoint(family: str) -> None:
    config, arrays, dtype = (
        read_config(GOLDEN / family),
        read_folder(GOLDEN / family),
        jnp.dtype(jnp.bfloat16),
    )
    check_leaves(config, arrays, read_arrays(GOLDEN / family, config, dtype, report=print), dtype)
    if config.tied_head:  # a training program may well have the tied head beside the embedding
        arrays["lm_head.weight"] = arrays.get("model.embed_tokens.weight", np.zeros((2, 2), np.float32))
        check_leaves(config, arrays, read_arrays(GOLDEN / family, config, dtype, report=print), dtype)


def test_quantized_weights_are_quantized_as_at_load() -> None:
    config, dtype = read_config(FOLDER), jnp.dtype(jnp.float32)
    narrow = NARROW["int8"]
    backend, _ = choose_backend("cpu", config, kernels="auto", quantized=narrow, dtype=dtype, kv_dtype=dtype)
    quantization = choose_quantization(narrow, backend, dtype)
    read = read_arrays(FOLDER, config, dtype, report=print, quantization=quantization, backend=backend)
    check_leaves(config, read_folder(FOLDER), read, dtype, quantization=quantization, backend=backend)


def check_leaves(config: ModelConfig, arrays: Arrays, read: Any, dtype: jnp.dtype, **how: Any) -> None:
    given = convert_tensors(tensors_in_memory(arrays, config), config, dtype, report=print, **how)
    for one, other in zip(in_order(given), in_order(read), strict=True):
        np.testing.assert_array_equal(one, other)
