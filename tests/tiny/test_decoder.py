"""Every golden family, prefilled in chunks of every size over pages of every size, then decoded."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model import cache
from levserve.model.config import Activation, LongScaling, Rope
from levserve.model.decoder import Decoder
from levserve.model.feed_forward import ACTIVATIONS, CHUNK, ROW, Experts
from levserve.model.gpu.backend import GpuBackend
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.quantize import NARROW, choose_quantization
from levserve.model.rotary import angles_at, rotate
from levserve.model.select import choose_backend
from levserve.model.xla import XlaBackend
from levserve.weights.checkpoint import load_arrays, read_config
from tests.conftest import GOLDEN
from tests.tiny.test_gguf import golden_gguf

FLOAT32 = jnp.dtype(jnp.float32)
SHAPE = 128
SMALL_SHAPE = 16
"""Every chunk is padded to one of these two sizes: two programs per family and page size."""


@functools.cache
def load(family: str) -> tuple[Decoder, list[dict[str, Any]]]:
    folder = GOLDEN / family
    config = read_config(folder)
    model = Decoder.from_arrays(
        config, load_arrays(folder, config, jnp.dtype(jnp.float32), report=lambda _: None)
    )
    return model, json.loads((folder / "golden.json").read_text())["cases"]


@jax.jit
def logits_of(
    model: Decoder, tokens: jax.Array, pools: Any, table: jax.Array, positions: jax.Array
) -> tuple[jax.Array, Any]:
    hidden, pools = model(tokens, pools, table, positions)
    return model.logits(hidden[ROW, 0].rename({CHUNK: ROW})), pools


def run_in_chunks(model: Decoder, tokens: list[int], chunk: int, page_size: int) -> np.ndarray:
    """Log-probabilities [token, vocab] after every token, computed `chunk` at a time on shuffled pages.

    Chunks are padded to a shape, as the engine pads them to its buckets.
    """
    shape = SMALL_SHAPE if chunk <= SMALL_SHAPE else SHAPE
    width = -(-SHAPE // page_size)
    table = jnp.asarray(np.random.default_rng(0).permutation(width + 2)[None, :width], jnp.int32)
    pools = cache.make_pool(model.config, width + 2, page_size, jnp.dtype(jnp.float32))
    rows = []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        padding = shape - len(part)
        positions = jnp.asarray([[*range(start, start + len(part)), *[-1] * padding]], jnp.int32)
        logits, pools = logits_of(
            model, jnp.asarray([part + [0] * padding], jnp.int32), pools, table, positions
        )
        rows.append(np.asarray(jax.nn.log_softmax(logits))[: len(part)])
    return np.concatenate(rows)


def check(case: dict[str, Any], logprobs: np.ndarray) -> None:
    tokens, start = case["prompt"] + case["greedy"], len(case["prompt"])
    assert logprobs[start - 1 : -1].argmax(-1).tolist() == case["greedy"]
    got = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(got, case["prompt_logprobs"][1:] + case["greedy_logprobs"], atol=1e-3)


PAGE_SIZES = [
    ("llama", 4),
    ("llama", 16),
    ("llama", 32),
    ("mistral", 4),
    ("qwen3", 16),
    ("gemma2", 4),
    ("gemma3", 32),
    ("mixtral", 16),
]


@pytest.mark.parametrize(("family", "page_size"), PAGE_SIZES)
def test_a_family_matches_its_reference_in_chunks_of_every_size(family: str, page_size: int) -> None:
    """One of each kind of attention and feed-forward part; the engine's tests go through all families.

    They also compute tokens one by one after every prompt, which is done here for one text.
    """
    model, cases = load(family)
    for case in cases:
        tokens = case["prompt"] + case["greedy"]
        for chunk in (7, SHAPE):
            check(case, run_in_chunks(model, tokens, chunk, page_size))
    case = min(cases, key=lambda case: abs(len(case["prompt"]) - 17))
    for chunk in range(1, len(case["prompt"]) + 1):
        check(case, run_in_chunks(model, case["prompt"] + case["greedy"], chunk, page_size))


@pytest.mark.parametrize("kernels", ["auto", "xla"])
@pytest.mark.parametrize("scaling", ["llama-yarn", "llama-dynamic"])
def test_a_rotary_scaling_matches_its_reference(scaling: str, kernels: str) -> None:
    """The weights are those of the llama folder."""
    config = read_config(GOLDEN / scaling)
    backend = choose_backend("cpu", config, kernels=kernels, dtype=FLOAT32, kv_dtype=FLOAT32).backend
    arrays = load_arrays(GOLDEN / "llama", config, FLOAT32, report=lambda _: None, backend=backend)
    model = Decoder.from_arrays(config.stretched_for(SHAPE), arrays, backend=backend)
    for case in json.loads((GOLDEN / scaling / "golden.json").read_text())["cases"]:
        check(case, run_in_chunks(model, case["prompt"] + case["greedy"], SHAPE, 16))


INTERPRETED = GpuBackend(interpret=True)
"""The GPU's kernels, run by jax wherever the test runs."""


def run_prompt_then_tokens(model: Decoder, tokens: list[int], length: int) -> np.ndarray:
    """Log-probabilities after every token: `length` in one chunk, then one at a time beside padding."""
    table = jnp.asarray([[3, 1, 5, 0], [2, 4, 6, 7]], jnp.int32)
    pools = cache.make_pool(model.config, 8, 16, jnp.dtype(jnp.float32))
    padding = -length % 16
    chunk = jnp.asarray([tokens[:length] + [0] * padding], jnp.int32)
    positions = jnp.asarray([[*range(length), *[-1] * padding]], jnp.int32)
    logits, pools = logits_of(model, chunk, pools, table[:1], positions)
    rows = [np.asarray(jax.nn.log_softmax(logits))[:length]]
    for position in range(length, len(tokens)):
        fed, at = [[tokens[position]], [7]], jnp.asarray([[position], [-1]], jnp.int32)
        logits, pools = logits_of(model, jnp.asarray(fed, jnp.int32), pools, table, at)
        rows.append(np.asarray(jax.nn.log_softmax(logits)))
    return np.concatenate(rows)


@pytest.mark.parametrize("family", ["olmo3", "gemma2", "gpt-neox", "qwen3-moe"])
def test_a_family_matches_its_reference_through_the_gpu_kernels(family: str) -> None:
    """Covers norms over all heads with windows and rotary scaling, soft caps, heads that are partly
    rotated, and norms of single heads with experts.

    The last and the first family also have what qwen3 and olmo2 have.
    """
    folder = GOLDEN / family
    config = read_config(folder)
    arrays = load_arrays(folder, config, jnp.dtype(jnp.float32), report=lambda _: None)
    model = Decoder.from_arrays(config, arrays, backend=INTERPRETED)
    case = min(load(family)[1], key=lambda case: abs(len(case["prompt"]) - 17))
    check(case, run_prompt_then_tokens(model, case["prompt"] + case["greedy"], len(case["prompt"])))


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_no_number_format_of_the_matrices_takes_anything_from_the_gpu_kernels(kind: str) -> None:
    """The kernels take products that are rounded, and those that are scaled. One layer has all of them."""
    folder, dtype = GOLDEN / "llama", jnp.dtype(jnp.bfloat16)
    config = read_config(folder)
    quantization = choose_quantization(NARROW.get(kind), INTERPRETED, dtype)
    arrays = load_arrays(folder, config, dtype, report=lambda _: None, quantization=quantization)
    arrays = {
        name: cache.from_bits(array)
        for name, array in arrays.items()
        if name.startswith("layers.0.") or not name.startswith("layers.")
    }
    plain, kernels = (
        Decoder.from_arrays(replace(config, num_layers=1), arrays, backend=backend, quantization=quantization)
        for backend in (XlaBackend("gpu"), INTERPRETED)
    )
    tokens = max((case["prompt"] for case in load("llama")[1]), key=len)[:6]
    difference = np.abs(run_prompt_then_tokens(kernels, tokens, 2) - run_prompt_then_tokens(plain, tokens, 2))
    assert difference.mean() < 0.03, "no more than what products in bfloat16 make"


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_gguf_file_of_a_gemma_matches_the_reference(family: str, tmp_path: Path) -> None:
    """Its arrays differ from the folder's; those of other families are equal, as tests of the loader show."""
    path, (_, cases) = golden_gguf(tmp_path, family), load(family)
    config = read_config(path)
    model = Decoder.from_arrays(
        config, load_arrays(path, config, jnp.dtype(jnp.float32), report=lambda _: None)
    )
    for case in cases:
        check(case, run_in_chunks(model, case["prompt"] + case["greedy"], SHAPE, 16))


def test_experts_applied_one_by_one_by_choice_and_all_at_once_agree() -> None:
    experts = load("mixtral")[0].layers[0].mlp
    assert isinstance(experts, Experts)
    tokens = np.random.default_rng(0).standard_normal((4, 3, 64), np.float32)
    every = np.asarray(jax.jit(lambda experts, *given: experts.every(*given))(experts, tokens))
    one = jax.jit(lambda experts, *given: experts.one(*given))
    for number in range(4):
        alone = one(experts, np.int32(number), tokens[number])
        np.testing.assert_allclose(alone, every[number], rtol=1e-4, atol=1e-4)
    two = np.stack([tokens[2, 1], tokens[0, 0]])
    chosen = jax.jit(lambda experts, *given: experts.chosen(*given))(experts, np.array([2, 0], np.int32), two)
    np.testing.assert_allclose(chosen, np.stack([every[2, 1], every[0, 0]]), rtol=1e-4, atol=1e-4)


def test_experts_stored_as_bits_are_read_as_the_numbers_they_are() -> None:
    config = read_config(GOLDEN / "mixtral")
    stored = load_arrays(GOLDEN / "mixtral", config, jnp.dtype(jnp.bfloat16), report=lambda _: None)
    exact = load_arrays(GOLDEN / "mixtral", config, jnp.dtype(jnp.float32), report=lambda _: None)
    experts = Decoder.from_arrays(config, stored).layers[1].mlp
    assert isinstance(experts, Experts) and stored["layers.1.experts_down"].dtype == jnp.uint16
    matrix = experts.stacked.down.of_expert(jnp.int32(3)).weight.array
    np.testing.assert_array_equal(matrix, exact["layers.1.experts_down"][3].astype(jnp.bfloat16))


def test_the_two_forms_of_gelu_are_told_apart() -> None:
    """Golden outputs hardly tell them apart: the formulas differ by 5e-4 at most."""
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    exact = [number * (1 + math.erf(number / math.sqrt(2))) / 2 for number in x.tolist()]
    found = {kind: np.asarray(ACTIVATIONS[kind](hax.named(x, "x")).array) for kind in Activation}
    np.testing.assert_allclose(found[Activation.GELU], exact, atol=1e-6)
    assert 1e-4 < np.abs(found[Activation.GELU_TANH] - exact).max() < 1e-3


def test_part_of_a_head_turns_and_long_factors_slow_it() -> None:
    scaling = LongScaling((1.0, 1.0), (2.0, 4.0), original_max_position=8, attention_factor=1.5)
    x = jnp.arange(1.0, 7.0, dtype=jnp.float32).reshape(1, 1, 1, 6)
    (turned,) = np.asarray(rotate(x, angles_at(jnp.asarray([[3]], jnp.int32), Rope(4, 100.0, scaling))))[0, 0]
    angles = 3 / np.array([2.0, 10 * 4.0])
    pairs = (np.array([1 + 3j, 2 + 4j]) * np.exp(1j * angles)) * 1.5
    np.testing.assert_allclose(turned, [*pairs.real, *pairs.imag, 5, 6], rtol=1e-6)


def test_a_model_has_exactly_the_arrays_it_names() -> None:
    model, _ = load("qwen3")
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(model))
    assert shapes == sorted(parameter_shapes(model.config).values())


def test_neighbours_in_a_batch_do_not_change_a_row() -> None:
    model, cases = load("llama")
    config = model.config
    pools = cache.make_pool(config, 16, 8, jnp.dtype(jnp.float32))
    table = np.arange(16, dtype=np.int32).reshape(4, 4)
    prompts = [case["prompt"][:4] for case in cases if len(case["prompt"]) >= 4]
    tokens = np.asarray([prompts[0], prompts[1], prompts[0], prompts[2]], np.int32)
    positions = np.tile(np.arange(4, dtype=np.int32), (4, 1))
    hidden, _ = jax.jit(lambda model, *given: model(*given))(model, tokens, pools, table, positions)
    assert isinstance(hidden, hax.NamedArray)
    states = np.asarray(hidden.array)
    np.testing.assert_allclose(states[0], states[2], atol=1e-6)
