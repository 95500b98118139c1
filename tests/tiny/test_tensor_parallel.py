"""Models that several devices share compute what one device computes, and exchange as little as they must.

The devices are four parts of this machine's CPU (see `conftest.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from numpy.typing import NDArray

from levserve.api.model import Model
from levserve.device.lowering import Lowering
from levserve.device.mesh import choose_mesh
from levserve.errors import ConfigError, StartupError
from levserve.model import cache
from levserve.model.config import ModelConfig
from levserve.model.decoder import Blueprint
from levserve.model.feed_forward import ROW
from levserve.model.int8_packing import UNSIGNED_ORDER
from levserve.model.packed import Kept
from levserve.model.placement import WHOLE, device_bytes, make_mesh
from levserve.model.quantize import NARROW, Quantization, choose_quantization, quantize_arrays
from levserve.model.rules import Mode
from levserve.model.sharding import Shards, local_config, share_of
from levserve.model.xla import XLA_ON_CPU
from levserve.models.choose import describe
from levserve.settings.parse import parse_settings
from levserve.settings.settings import Settings
from levserve.weights.checkpoint import convert_tensors, load_arrays, read_arrays, read_config
from levserve.weights.memory_tensors import tensors_in_memory
from levserve.weights.source import find_source
from tests.brains import brain_folder
from tests.conftest import FAMILIES, GOLDEN
from tests.engines import Running, ask, running_engine
from tests.tiny.test_gguf import metadata_of, tensors_of, write_gguf
from tests.tiny.test_loaded_weights import read_folder

FLOAT32 = jnp.dtype(jnp.float32)
CASES = json.loads((GOLDEN / "llama" / "golden.json").read_text())["cases"]
SIZES = ("--page-size", "4", "--prefill-chunk", "16")
"""The sizes of other tests, so that their programs for one device are found."""
PAGE_SIZE = 8
NUM_SCORED = 12
"""Generated tokens of a golden case that are scored after its prompt."""


def golden_case(family: str) -> tuple[list[int], int]:
    """The tokens of a prompt and its greedy answer, and the prompt's length."""
    case: dict[str, Any] = json.loads((GOLDEN / family / "golden.json").read_text())["cases"][0]
    return [*case["prompt"], *case["greedy"][:NUM_SCORED]], len(case["prompt"])


def golden_logprobs(family: str) -> list[float]:
    """The log-probabilities of all tokens of the golden case except the first."""
    case: dict[str, Any] = json.loads((GOLDEN / family / "golden.json").read_text())["cases"][0]
    return [*case["prompt_logprobs"][1:], *case["greedy_logprobs"][:NUM_SCORED]]


@functools.cache
def score(family: str, count: int, quantization: Quantization | Kept | None = None) -> NDArray[np.float32]:
    """Log-probabilities [place, token] of a golden case on `count` devices."""
    config = read_config(GOLDEN / family)
    mesh = make_mesh(jax.devices()[:count])
    arrays = load_arrays(
        GOLDEN / family, config, FLOAT32, report=lambda _: None, quantization=quantization, mesh=mesh
    )
    blueprint = Blueprint(local_config(config, count), quantization=quantization)
    tokens, _ = golden_case(family)
    size = len(tokens)
    num_pages = -(-size // PAGE_SIZE)

    def run(leaves: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        model = blueprint.build(leaves)
        pools = cache.make_pool(model.config, num_pages, PAGE_SIZE, FLOAT32)
        table = jnp.arange(num_pages, dtype=jnp.int32)[None]
        hidden, _ = model(tokens, pools, table, jnp.arange(size, dtype=jnp.int32)[None])
        rows = hidden["row", 0].rename({"chunk": ROW})
        return jax.nn.log_softmax(model.logits(rows))

    lowering = Lowering(mesh)
    lowered = lowering.lower(run, arrays, lowering.argument((1, size), jnp.int32), returns=WHOLE)
    return np.asarray(lowered.compile()(arrays, np.array([tokens], np.int32)))


ON_TWO = ("llama", "mixtral", "deepseek3", "gpt2")
"""One family for each part that two devices share differently than four: keys and values that each device
has a copy of or a part of, experts, latent attention, and joined matrices with biases."""


CUT_LIKE_OTHERS = {"llama3-rope", "mistral", "gemma", "phi3", "olmo2", "granite"}
"""Their arrays have the names and shares of those of llama, gemma2 and olmo3; where they compute something
else, every device does it on its own."""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in CUT_LIKE_OTHERS])
def test_families_compute_on_two_and_four_devices_what_their_references_do(family: str) -> None:
    """Two devices run only one family of each kind: a program of three layers for several devices takes a
    second to compile."""
    tokens, prompt_len = golden_case(family)
    by_four = score(family, 4)
    if family in ON_TWO:
        np.testing.assert_allclose(score(family, 2), by_four, atol=1e-4, rtol=0)
    assert by_four.argmax(-1)[prompt_len - 1 : -1].tolist() == tokens[prompt_len:]
    told = by_four[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(told, golden_logprobs(family), atol=3e-4, rtol=0)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_matrices_are_quantized_after_they_are_cut(in_blocks: bool) -> None:
    quantization = choose_quantization(NARROW["int8"], XLA_ON_CPU, FLOAT32, in_blocks=in_blocks)
    exact, alone, shared = score("llama", 1), score("llama", 1, quantization), score("llama", 4, quantization)
    # Each device has scales of its own, so nothing is equal; as much is lost as on one device.
    assert np.abs(shared - exact).mean() < 1.3 * np.abs(alone - exact).mean()


@pytest.mark.parametrize("in_blocks", [False, True])
def test_shares_that_are_quantized_together_are_those_that_are_quantized_alone(in_blocks: bool) -> None:
    packed = Quantization(
        NARROW["int8"], None, is_packed=True, has_blocks=in_blocks, block_order=UNSIGNED_ORDER
    )
    config = read_config(GOLDEN / "llama")
    for rows in (64, 48):  # shares of the second cannot be packed, though all of them together could
        shares = np.random.default_rng(rows).normal(size=(2, rows, 64)).astype(np.float32)
        stacked = [("layers.0.out", shares.reshape(-1, 64))]
        together = dict(quantize_arrays(config, stacked, FLOAT32, packed, num_shares=2))
        alone = [dict(quantize_arrays(config, [("layers.0.out", each)], FLOAT32, packed)) for each in shares]
        for name, array in together.items():
            np.testing.assert_array_equal(array, np.concatenate([each[name] for each in alone]))


CHECKPOINTS = [*FAMILIES, "levanter-llama", "levanter-mixtral"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_is_read_for_some_devices_is_their_part_of_the_whole(name: str) -> None:
    path = GOLDEN / name
    config = read_config(path)
    whole = dict(read_arrays(path, config, FLOAT32, report=print))
    shards = Shards(4, (1, 2))  # a process that has two of four devices
    for array, host in read_arrays(path, config, FLOAT32, report=print, shards=shards):
        np.testing.assert_array_equal(host, cut(array, whole[array], config, shards))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0])
def test_of_a_gguf_file_too_each_device_gets_its_part(kind: Kind, tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    for name, (tensor, _) in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = (quants.quantize(tensor.astype(np.float32), kind), kind)
    path = write_gguf(tmp_path / "model.gguf", metadata_of("llama"), tensors)
    config = read_config(path)
    whole = dict(read_arrays(path, config, FLOAT32, report=print))
    # A part of `down` begins at a block of 32 values, one of `out` within a block.
    shards = Shards(4, (3,))
    for array, host in read_arrays(path, config, FLOAT32, report=print, shards=shards):
        np.testing.assert_array_equal(host, cut(array, whole[array], config, shards))


@pytest.mark.parametrize(
    ("name", "part"), [("q_proj", np.s_[:16]), ("o_proj", np.s_[:, :16]), ("v_proj", np.s_[:16])]
)
def test_what_other_devices_hold_is_not_read(name: str, part: Any) -> None:
    config, arrays = read_config(GOLDEN / "llama"), read_folder(GOLDEN / "llama")
    spoilt = arrays[f"model.layers.1.self_attn.{name}.weight"].copy()
    spoilt[part] = np.nan  # reading it is an error
    tensors = tensors_in_memory(arrays | {f"model.layers.1.self_attn.{name}.weight": spoilt}, config)
    list(convert_tensors(tensors, config, FLOAT32, report=print, shards=Shards(4, (2, 3))))
    with pytest.raises(StartupError, match=f"{name}.weight is corrupt"):
        list(convert_tensors(tensors, config, FLOAT32, report=print, shards=Shards(4, (0,))))


def cut(name: str, whole: NDArray[Any], config: ModelConfig, shards: Shards) -> NDArray[Any]:
    """The shares of an array, according to the table alone."""
    shares = []
    for index in shards.here:
        share = share_of(name, whole.ndim, config, shards.count, index)
        if share is None:
            return whole
        parts = [np.take(whole, np.array(part), axis=share.axis) for part in share.ranges]
        shares.append(np.concatenate(parts, axis=share.axis))
    return np.concatenate(shares)


def test_words_that_do_not_divide_are_filled_up_with_zeros() -> None:
    config = replace(read_config(GOLDEN / "llama"), vocab_size=10)
    assert local_config(config, 4).vocab_rows == 3
    shares = [share_of("embed", 2, config, 4, index) for index in range(4)]
    assert [share and share.ranges for share in shares] == [
        (range(3),),
        (range(3, 6),),
        (range(6, 9),),
        (range(9, 10),),
    ]


@pytest.mark.parametrize(
    ("heads", "count", "words"),
    [
        ({}, 3, "its 4 query heads cannot be shared evenly by 3 devices"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "its 6 key and value heads can neither be shared"),
        ({"intermediate_size": 30}, 4, "its feed-forward part of width 30 cannot be shared evenly"),
        ({}, 8, "jax finds only 4 cpu devices"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_before_it_is_loaded(
    heads: dict[str, int], count: int, words: str
) -> None:
    config = replace(read_config(GOLDEN / "llama"), **heads)
    with pytest.raises(ConfigError, match=f"--tensor-parallel {count}.*{words}"):
        choose_mesh(Settings(tensor_parallel=count), config)


def test_auto_takes_as_many_devices_as_divide_the_model() -> None:
    config = read_config(GOLDEN / "llama")
    for heads, count in ((4, 4), (6, 3), (5, 1)):
        config = replace(config, num_heads=heads, num_kv_heads=heads, intermediate_size=120)
        mesh = choose_mesh(parse_settings(["--tensor-parallel", "auto"], {}), config)
        assert (1 if mesh is None else mesh.size) == count


def test_a_brain_runs_on_one_device() -> None:
    flags = ["--model", str(brain_folder("hrm-tiny-moe")), "--compile-cache", "false", "--tensor-parallel"]
    settings = parse_settings([*flags, "2"], {})
    with pytest.raises(ConfigError, match="--tensor-parallel does not apply .* runs on one device"):
        describe(settings, find_source(settings, lambda _: None))
    settings = parse_settings([*flags, "auto"], {})
    assert len(describe(settings, find_source(settings, lambda _: None)).devices) == 1


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running_engine(GOLDEN / "llama", *SIZES, "--tensor-parallel", "4") as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> Iterator[Running]:
    with running_engine(GOLDEN / "llama", *SIZES) as running:
        yield running


def test_an_engine_on_several_devices_answers_as_on_one(shared: Running, alone: Running) -> None:
    asked = [
        ask(CASES[0]["prompt"], num_logprobs=2),
        ask(CASES[1]["prompt"], score_from=1),
        ask(CASES[2]["prompt"], temperature=1.0, top_p=0.9, seed=7),
        ask(CASES[3]["prompt"], temperature=0.7, top_k=20, repetition_penalty=1.2, seed=8),
    ]
    answers, wanted = (
        shared.run(*asked),
        alone.run(*(replace(one, request_id=f"x{one.request_id}") for one in asked)),
    )
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
    assert answers[0].tokens == CASES[0]["greedy"]
    for kind in ("logprobs", "prompt_logprobs"):
        for answer, other in zip(answers, wanted, strict=True):
            mine, theirs = ([score.logprob for score in getattr(each, kind)] for each in (answer, other))
            np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_devices_exchange_two_sums_a_layer_one_for_the_embedding_and_the_logits(shared: Running) -> None:
    programs, config = shared.loaded.runner.programs, read_config(GOLDEN / "llama")
    decode = programs.first_shapes[-1]
    assert decode.mode is Mode.FULL
    compiled = programs.lower(decode).compile()
    text = compiled.as_text()
    assert text.count(" all-reduce(") == 2 * config.num_layers + 1
    assert text.count(" all-gather(") == 1
    for other in ("all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {other}(" not in text
    state_bytes = sum(map(device_bytes, jax.tree.leaves(shared.loaded.runner._state)))
    assert compiled.memory_analysis().alias_size_in_bytes == state_bytes, "state is written in place"


def test_weights_are_swapped_on_all_devices(shared: Running) -> None:
    model, arrays = Model(shared.registry, Settings()), read_folder(GOLDEN / "llama")
    name = "model.layers.0.self_attn.o_proj.weight"
    model.load_weights(arrays | {name: np.roll(arrays[name], 3, axis=1)})
    assert shared.run(ask(CASES[0]["prompt"]))[0].tokens != CASES[0]["greedy"]
    assert shared.loaded.description.shards.count == 4
    model.load_weights(arrays)
    assert shared.run(ask(CASES[0]["prompt"]))[0].tokens == CASES[0]["greedy"]


def test_programs_of_several_devices_are_kept_and_found_again(shared: Running) -> None:
    with running_engine(GOLDEN / "llama", *SIZES, "--tensor-parallel", "4") as again:
        assert again.metric("compile_cache_hits_total") > 2
        assert again.run(ask(CASES[0]["prompt"]))[0].tokens == CASES[0]["greedy"]
