"""The HRM's forward pass against AI-OS's own, on every golden brain, alone and padded among others."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.device.text_sizing import plan_text_sizes
from levserve.model import text_attention
from levserve.model.config import Rope
from levserve.model.gpu.backend import GpuBackend
from levserve.model.hrm import Hrm
from levserve.model.hrm_config import HrmConfig, hrm_parameter_shapes
from levserve.model.rotary import angles_at
from levserve.model.text_attention import Texts
from levserve.model.traits import GPU_KERNEL_TRAITS
from levserve.model.xla import XLA_ON_CPU
from levserve.settings.parse import parse_settings
from levserve.weights.brain_config import read_brain_config
from levserve.weights.brain_folder import find_brain
from levserve.weights.brain_tensors import read_brain_arrays
from tests.brains import BRAINS, WIDE, brain_cases, brain_folder

FLOAT32 = jnp.dtype(jnp.float32)
SIZE = 64
"""The rows and tokens that every batch is padded to, so that each brain is compiled once."""
PLACES = 2 * SIZE
EVERY = 4
"""Only every fourth prefix of the wide brain is checked, because a batch of this size takes it seconds."""


@functools.cache
def load(name: str) -> Hrm:
    brain = find_brain(brain_folder(name))
    config = read_brain_config(brain, parse_settings([], {})).config
    arrays = read_brain_arrays(brain.weights, config, FLOAT32, report=lambda _: None)
    return Hrm.from_arrays(config, {name: jnp.asarray(array) for name, array in arrays})


def logprobs_at(
    model: Hrm, tokens: jax.Array, lengths: jax.Array, rows: jax.Array, places: jax.Array
) -> jax.Array:
    return jax.nn.log_softmax(model.logits(model(tokens, lengths)[rows, places]))


compile_quickly = jax.jit(logprobs_at)
# A run of the wide brain takes seconds, so optimizing pays.
compile_well = jax.jit(logprobs_at, compiler_options={"xla_backend_optimization_level": 3})


def run(name: str, texts: list[list[int]], at: list[tuple[int, int]]) -> np.ndarray:
    """Log-probabilities after the places `at` (row, position) of texts, padded to one shape for all tests."""
    size = SIZE // EVERY if name == WIDE else SIZE
    tokens = np.zeros((size, SIZE), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = [len(text) for text in texts] + [1] * (size - len(texts))
    rows, places = zip(*at, *[(0, 0)] * (PLACES - len(at)))
    given = (jnp.asarray(ints, jnp.int32) for ints in (tokens, lengths, rows, places))
    program = compile_well if name == WIDE else compile_quickly
    return np.asarray(program(load(name), *given))[: len(at)]


@pytest.mark.parametrize("name", [*BRAINS, WIDE])
def test_a_brain_says_what_ai_os_says_of_it(name: str) -> None:
    """All prefixes of prompt and answer are one batch: each row gives the distribution of the next token.

    The last row is the prompt with the continuation, which is asked about several places.
    """
    step = EVERY if name == WIDE else 1
    for case in brain_cases(name):
        text, first = case["prompt"] + case["greedy"], len(case["prompt"]) - 1
        wanted = case["prompt_logprobs"][1:] + case["greedy_logprobs"]
        ends = range(first % step + 1, len(text), step)  # the whole prompt is one of them
        whole = case["prompt"] + case["continuation"]
        lasts = [(row, end - 1) for row, end in enumerate(ends)]
        places = [(len(ends), place) for place in range(first, len(whole) - 1)]
        logprobs = run(name, [*(text[:end] for end in ends), whole], [*lasts, *places])

        found = logprobs[: len(ends)]
        of_prompt = ends.index(first + 1)
        assert found[of_prompt:].argmax(-1).tolist() == case["greedy"][::step]
        got = found[np.arange(len(ends)), [text[end] for end in ends]]
        np.testing.assert_allclose(got, [wanted[end - 1] for end in ends], atol=1e-3)
        top = [found[of_prompt][token] for token, _ in case["last_top5"]]
        np.testing.assert_allclose(top, [value for _, value in case["last_top5"]], atol=1e-3)

        in_one_pass = logprobs[len(ends) :]
        got = in_one_pass[np.arange(len(places)), case["continuation"]]
        np.testing.assert_allclose(got, case["continuation_logprobs_one_pass"], atol=1e-3)


def test_a_text_among_longer_ones_gives_the_same_numbers_as_alone() -> None:
    name = "hrm-tiny-moe"
    texts = [case["prompt"] for case in brain_cases(name)]
    together = run(name, texts, [(row, len(text) - 1) for row, text in enumerate(texts)])
    for row, text in enumerate(texts):
        np.testing.assert_allclose(together[row], run(name, [text], [(0, len(text) - 1)])[0], atol=1e-4)


def test_attention_in_blocks_of_queries_is_the_same_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, texts = random_heads(num_heads=2, size=8)
    at_once = attend_to_all(qkv, texts)
    monkeypatch.setattr(text_attention, "QUERY_BLOCK", 16)
    np.testing.assert_allclose(attend_to_all(qkv, texts), at_once, atol=1e-5)


def attend_to_all(qkv: jax.Array, texts: Texts) -> jax.Array:
    """Attends in one jitted program: outside one, jax would compile every operation separately."""
    mixed: jax.Array = jax.jit(lambda *given: text_attention.attend_to_all(*given, 2))(qkv, texts)
    return mixed


def test_a_gpus_kernels_mix_the_same_as_xla() -> None:
    qkv, texts = random_heads(num_heads=2, size=16)
    backend = GpuBackend(interpret=True)
    scratch = backend.text_scratch(*texts.is_real.shape, 2, 16, FLOAT32)
    attend = jax.jit(lambda *given: backend.attend_texts(*given, 2))
    for _ in range(2):  # what a call leaves in the scratch memory does not harm the next one
        mixed, scratch = attend(qkv, texts, scratch)
    wanted = attend_to_all(qkv, texts)
    seen = np.asarray(texts.is_real)
    np.testing.assert_allclose(np.asarray(mixed)[seen], np.asarray(wanted)[seen], atol=1e-5)


@pytest.mark.parametrize("max_seq_len", [40, 100])
def test_a_gpus_kernels_keep_texts_apart_whatever_their_limit_is(max_seq_len: int) -> None:
    sizes = plan_text_sizes(GPU_KERNEL_TRAITS, rows=8, max_seq_len=max_seq_len, vocab_size=96, weight_bytes=0)
    longest = sizes.lengths[-1]
    qkv, texts = random_heads(num_heads=2, size=16, lengths=(max_seq_len, max_seq_len - 7, 5), chunk=longest)
    backend = GpuBackend(interpret=True)
    scratch = backend.text_scratch(*texts.is_real.shape, 2, 16, FLOAT32)
    mixed, _ = jax.jit(lambda *given: backend.attend_texts(*given, 2))(qkv, texts, scratch)
    seen = np.asarray(texts.is_real)
    np.testing.assert_allclose(
        np.asarray(mixed)[seen], np.asarray(attend_to_all(qkv, texts))[seen], atol=1e-5
    )


def test_a_gpus_kernels_compute_a_whole_brain_as_xla_does() -> None:
    config = HrmConfig(96, 32, 16, 2, 1, 1, 2, 2, num_experts=4, experts_per_token=2, max_position=64)
    random = np.random.default_rng(0)
    arrays = {
        name: jnp.asarray(random.standard_normal(shape, np.float32) / 4)
        for name, shape in hrm_parameter_shapes(config).items()
    }
    tokens = jnp.asarray(random.integers(96, size=(3, 64)), jnp.int32)
    lengths, rows = jnp.asarray([64, 3, 33], jnp.int32), jnp.arange(3, dtype=jnp.int32)
    kernels, xla = (
        compile_quickly(Hrm.from_arrays(config, arrays, backend=backend), tokens, lengths, rows, lengths - 1)
        for backend in (GpuBackend(interpret=True), XLA_ON_CPU)
    )
    np.testing.assert_allclose(kernels, xla, atol=1e-4)


def random_heads(
    *, num_heads: int, size: int, lengths: Sequence[int] = (64, 40), chunk: int = 64
) -> tuple[jax.Array, Texts]:
    """The heads of texts of these lengths."""
    shape = len(lengths), chunk
    qkv = jnp.asarray(np.random.default_rng(0).standard_normal((*shape, 3 * num_heads * size), np.float32))
    places, ends = np.arange(chunk, dtype=np.int32)[None], np.asarray(lengths, np.int32)[:, None]
    angles = jax.jit(angles_at, static_argnums=1)(places, Rope(size, 10_000.0, None))
    lasts = np.broadcast_to(ends - 1, shape)
    return qkv, Texts(angles, jnp.asarray(places < ends), jnp.asarray(lasts))
