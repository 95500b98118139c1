"""The largest logits of an int8 head are computed again with the embedding; the others stay as they are."""

from __future__ import annotations

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.jit.target import detect_target
from levserve.model.cpu.backend import CpuBackend
from levserve.model.cpu.refine import MARGIN, MAX_NEAR, refine_logits
from levserve.model.decoder import Decoder
from levserve.model.feed_forward import ROW
from levserve.model.quantize import choose_quantization
from levserve.weights.checkpoint import load_arrays, read_config
from tests.conftest import GOLDEN

ROWS, VOCAB, SIZE = 5, 203, 48
FLOAT32 = jnp.dtype(jnp.float32)

pytestmark = pytest.mark.skipif(
    not (detect_target().has_dot_product or detect_target().has_vnni), reason="there are no products here"
)


def refine(logits: np.ndarray, hidden: np.ndarray, embed: jax.Array, num_used: int) -> np.ndarray:
    count = jnp.asarray([num_used], jnp.int32)
    arguments = jnp.asarray(logits), jnp.asarray(hidden), embed, count
    return np.asarray(jax.jit(lambda *args: refine_logits(*args, target=detect_target()))(*arguments))


def coarse_head(dtype: str) -> tuple[np.ndarray, np.ndarray, jax.Array, np.ndarray]:
    """Logits that are off by up to half, hidden states, the embedding, and the exact logits."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((ROWS, SIZE), dtype=np.float32)
    embed = jnp.asarray(rng.standard_normal((VOCAB, SIZE), dtype=np.float32) * 0.5, dtype)
    exact = hidden.astype(np.float64) @ np.asarray(embed, np.float64).T
    return (exact + rng.uniform(-0.5, 0.5, exact.shape)).astype(np.float32), hidden, embed, exact


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_near_the_largest_are_exact_and_others_stay(dtype: str) -> None:
    logits, hidden, embed, exact = coarse_head(dtype)
    got = refine(logits, hidden, embed, ROWS)
    is_near = logits >= logits.max(1, keepdims=True) - np.float32(MARGIN)
    assert 1 < is_near.sum(1).min() and is_near[:, VOCAB // 64 * 64 :].any() and not is_near.all(1).any()
    np.testing.assert_allclose(got[is_near], exact[is_near], atol=1e-5)
    np.testing.assert_array_equal(got[~is_near], logits[~is_near])


def test_a_row_gets_the_same_alone_and_padding_stays() -> None:
    logits, hidden, embed, _ = coarse_head("bfloat16")
    together = refine(logits, hidden, embed, 3)
    np.testing.assert_array_equal(together[3:], logits[3:])
    for row in range(3):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(refine(logits[one], hidden[one], embed, 1), together[one])


@pytest.mark.parametrize("num_near", [MAX_NEAR - 1, MAX_NEAR, MAX_NEAR + 1, 4 * MAX_NEAR])
def test_a_row_stays_if_too_many_logits_are_near_its_largest(num_near: int) -> None:
    rng = np.random.default_rng(0)
    vocab = 5 * MAX_NEAR + 3
    hidden = rng.standard_normal((2, SIZE), dtype=np.float32)
    embed = jnp.asarray(rng.standard_normal((vocab, SIZE), dtype=np.float32))
    logits = np.full((2, vocab), -20.0, np.float32)
    logits[0, rng.permutation(vocab)[:num_near]] = 1.0
    logits[1, [7, vocab - 1]] = 1.0
    got = refine(logits, hidden, embed, 2)
    assert (got[0] != logits[0]).sum() == (num_near if num_near <= MAX_NEAR else 0)
    assert np.flatnonzero(got[1] != logits[1]).tolist() == [7, vocab - 1], "whatever other rows have"


def test_a_row_without_a_largest_logit_stays() -> None:
    logits, hidden, embed, _ = coarse_head("bfloat16")
    logits[1, 7] = np.nan
    np.testing.assert_array_equal(refine(logits, hidden, embed, ROWS)[1], logits[1])


@pytest.mark.parametrize("in_blocks", [False, True], ids=["int8", "int8-blocks"])
@pytest.mark.parametrize(("family", "is_exact"), [("llama", True), ("mistral", False)])
def test_an_int8_head_that_shares_the_embedding_has_exact_logits_of_likely_tokens(
    family: str, is_exact: bool, in_blocks: bool
) -> None:
    config, target = read_config(GOLDEN / family), detect_target()
    assert config.tied_head == is_exact
    backend = CpuBackend(target=target, has_products=True, packs_int8=target.has_vnni)
    int8 = choose_quantization(jnp.dtype(jnp.int8), backend, FLOAT32, in_blocks=in_blocks)
    path, quiet = GOLDEN / family, lambda _: None
    arrays = load_arrays(path, config, FLOAT32, report=quiet, quantization=int8)
    model = Decoder.from_arrays(config, arrays, backend=backend, quantization=int8)
    head = load_arrays(path, config, FLOAT32, report=quiet)["embed" if is_exact else "head"]

    hidden = np.random.default_rng(0).standard_normal((4, config.hidden_size), dtype=np.float32)
    logits = np.asarray(model.logits(hax.named(jnp.asarray(hidden), (ROW, config.Embed))))
    difference = np.abs(logits - hidden @ np.asarray(head).T)
    likely = np.argsort(logits)[:, -3:]
    lost = np.take_along_axis(difference, likely, 1)
    assert difference.max() > 1e-3, "others are rounded"
    assert (lost.max() < 1e-4) == is_exact
    assert arrays["head_scale"].ndim == (1 if is_exact or not in_blocks else 2)
