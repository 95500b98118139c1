"""Checkpoints that are quantized already: read as they are, kept in their bits, and what they stand for."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from safetensors.numpy import load_file, save_file

from levserve.errors import ConfigError, StartupError
from levserve.model.decoder import Decoder
from levserve.model.gpu import backend as gpu
from levserve.model.packed import OFFSET, SCALE, ZERO, Code, Kept, PackedMatrix, Scheme, pack_nibbles
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.quantize import NARROW
from levserve.model.sharding import Shards
from levserve.models.matrices import arrange, choose_narrow, keeps_bits
from levserve.settings.parse import parse_settings
from levserve.weights.checkpoint import load_arrays, read_arrays, read_config, read_schemes
from tests.conftest import GOLDEN
from tests.quantized_files import EXAMPLES, INT4_KIND, quantize_folder
from tests.tiny.test_decoder import run_in_chunks

FLOAT32 = jnp.dtype(jnp.float32)
CONFIG = read_config(GOLDEN / "llama")
ENDS = ("", SCALE, ZERO, OFFSET)
widen = jax.jit(lambda matrix: matrix.widen(FLOAT32).array)
"""Jitted, because outside jit jax would compile every operation separately."""
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @functools.cache
    def make(name: str) -> Path:
        return quantize_folder(GOLDEN / "llama", tmp_path_factory.mktemp(name), EXAMPLES[name])

    return make


def load_kept(folder: Path, num_shards: int = 1) -> tuple[Kept, dict[str, jax.Array]]:
    kept = Kept(tuple(read_schemes(folder, CONFIG, num_shards).items()), FLOAT32)
    return kept, load_arrays(folder, CONFIG, FLOAT32, report=lambda _: None, quantization=kept)


def widened(kept: Kept, arrays: dict[str, jax.Array], name: str) -> np.ndarray:
    axes = tuple(Axis(f"axis{number}", size) for number, size in enumerate(parameter_shapes(CONFIG)[name]))
    matrix = PackedMatrix.from_arrays(arrays, kept.by_name()[name], axes, name)
    return np.asarray(widen(matrix))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_number_is_the_one_that_the_format_means(name: str, folders: Folders) -> None:
    folder = folders(name)
    wanted = load_arrays(folder / "plain", CONFIG, FLOAT32, report=lambda _: None)
    read = load_arrays(folder, CONFIG, FLOAT32, report=lambda _: None)
    kept, arrays = load_kept(folder)
    matrices = [
        each for each, shape in parameter_shapes(CONFIG).items() if len(shape) > 1 and each != "embed"
    ]
    assert sorted(kept.by_name()) == sorted(matrices), "all of them stay in their own bits"
    for each in wanted:
        np.testing.assert_array_equal(read[each], wanted[each], err_msg=each)
        got = widened(kept, arrays, each) if each in kept.by_name() else arrays[each]
        np.testing.assert_array_equal(got, wanted[each], err_msg=each)


@pytest.mark.parametrize("name", ["awq", "fp8-static"])
def test_a_model_in_its_own_bits_computes_what_its_numbers_give(name: str, folders: Folders) -> None:
    folder = folders(name)
    tokens = json.loads((GOLDEN / "llama" / "golden.json").read_text())["cases"][2]["prompt"]
    plain = Decoder.from_arrays(CONFIG, load_arrays(folder / "plain", CONFIG, FLOAT32, report=lambda _: None))
    kept, arrays = load_kept(folder)
    model = Decoder.from_arrays(CONFIG, arrays, quantization=kept)
    wanted, got = (run_in_chunks(each, tokens, 128, 16) for each in (plain, model))
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert (got.argmax(-1) == wanted.argmax(-1)).all()


def test_shares_of_several_devices_put_together_are_the_whole_matrix(folders: Folders) -> None:
    """On two devices, outputs are cut for qkv, inputs with their groups for out; row scales stay whole."""
    for name in ("awq", "fp8-blocks", "ct-int8"):
        folder = folders(name)
        plain = load_arrays(folder / "plain", CONFIG, FLOAT32, report=lambda _: None)
        kept = Kept(tuple(read_schemes(folder, CONFIG, 2).items()), FLOAT32)
        shards = Shards(2, (0, 1))
        found = dict(
            read_arrays(folder, CONFIG, FLOAT32, report=lambda _: None, quantization=kept, shards=shards)
        )
        of_out, of_qkv = "layers.0.out", "layers.0.qkv"
        assert {of_out, of_qkv} <= kept.by_name().keys()
        halves = [share_of(kept, found, of_out, number, (64, 32)) for number in range(2)]
        np.testing.assert_array_equal(np.concatenate(halves, 1), plain[of_out])
        q, k, v = np.split(np.asarray(plain[of_qkv]), (64, 96))
        for number in range(2):
            parts = [np.split(part, 2)[number] for part in (q, k, v)]
            got = share_of(kept, found, of_qkv, number, (64, 64))
            np.testing.assert_array_equal(got, np.concatenate(parts))


def share_of(
    kept: Kept, found: dict[str, np.ndarray], name: str, number: int, shape: tuple[int, int]
) -> np.ndarray:
    parts = {end: jnp.asarray(np.split(found[name + end], 2)[number]) for end in ENDS if name + end in found}
    axes = (Axis("rows", shape[0]), Axis("columns", shape[1]))
    return np.asarray(widen(PackedMatrix.from_arrays(parts, kept.by_name()[name], axes)))


@pytest.mark.parametrize("name", ["awq", "ct-int8"])
def test_a_kernel_may_want_codes_in_another_order(
    name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "runs_here", lambda: True)
    stored = tuple(read_schemes(folders(name), CONFIG, 1).items())
    kept = arrange(Kept(stored, jnp.dtype(jnp.bfloat16)), gpu.GpuBackend(), CONFIG)
    changed = [name for name, scheme in kept.schemes if scheme.in_lanes]
    assert "layers.1.down" in changed
    arrays = load_arrays(folders(name), CONFIG, FLOAT32, report=lambda _: None, quantization=kept)
    in_order = load_arrays(
        folders(name), CONFIG, FLOAT32, report=lambda _: None, quantization=Kept(stored, FLOAT32)
    )
    wanted = load_arrays(folders(name) / "plain", CONFIG, FLOAT32, report=lambda _: None)
    for each in changed:
        np.testing.assert_array_equal(widened(kept, arrays, each), wanted[each], err_msg=each)
        assert not np.array_equal(arrays[each], in_order[each])


def test_experts_stay_in_their_own_bits(tmp_path: Path) -> None:
    folder = quantize_folder(GOLDEN / "qwen3-moe", tmp_path, EXAMPLES["fp8-static"])
    config = read_config(folder)
    kept = Kept(tuple(read_schemes(folder, config, 1).items()), FLOAT32)
    assert kept.by_name()["layers.0.experts_down"] == Scheme(Code.FP8, 32, 32, scale=jnp.dtype(jnp.bfloat16))
    models = []
    for quantization, path in ((None, folder / "plain"), (kept, folder)):
        arrays = load_arrays(path, config, FLOAT32, report=lambda _: None, quantization=quantization)
        models.append(Decoder.from_arrays(config, arrays, quantization=quantization))
    wanted, got = (run_in_chunks(model, list(range(3, 20)), 128, 16) for model in models)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_mxfp4_is_a_scheme_too() -> None:
    """A code has a sign, two bits of exponent and one of mantissa; scales are powers of two."""
    numbers = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = np.stack([np.arange(16), np.arange(16)[::-1]]).astype(np.uint8)
    packed = np.empty((2, 8), np.uint8)
    pack_nibbles(codes, packed)
    scheme = Scheme(Code.E2M1, 8, scale=jnp.dtype(jnp.uint8))
    scales = np.asarray([[127, 130], [120, 127]], np.uint8)
    matrix = PackedMatrix(
        jnp.asarray(packed), jnp.asarray(scales.T), None, scheme, (Axis("rows", 2), Axis("columns", 16))
    )
    wanted = numbers[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 8, 1)
    np.testing.assert_array_equal(widen(matrix), wanted)
    assert scheme.num_bytes((2, 16)) == 16 + 4


def test_the_plan_counts_the_bytes_that_are_kept(folders: Folders) -> None:
    kept, arrays = load_kept(folders("awq"))
    shapes = parameter_shapes(CONFIG)
    for name, scheme in kept.schemes:
        parts = [arrays[name + end] for end in ENDS if name + end in arrays]
        assert scheme.num_bytes(shapes[name]) == sum(part.nbytes for part in parts)
        assert scheme.num_bytes(shapes[name]) < 0.6 * np.prod(shapes[name])


def test_matrices_that_are_not_quantized_alike_are_widened_together(tmp_path: Path) -> None:
    """The keys of the first layer are not quantized, so its fused queries, keys and values are in float32."""
    folder = quantize_folder(GOLDEN / "llama", tmp_path, EXAMPLES["gptq"])
    layer = "model.layers.0.self_attn.k_proj."
    tensors = load_file(folder / "model.safetensors")
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(layer)}
    plain = load_file(folder / "plain" / "model.safetensors")
    save_file(others | {layer + "weight": plain[layer + "weight"]}, folder / "model.safetensors")
    kept, arrays = load_kept(folder)
    assert "layers.0.qkv" not in kept.by_name() and "layers.1.qkv" in kept.by_name()
    wanted = load_arrays(folder / "plain", CONFIG, FLOAT32, report=lambda _: None)
    np.testing.assert_array_equal(arrays["layers.0.qkv"], wanted["layers.0.qkv"])


def changed(folder: Path, name: str, tensor: np.ndarray | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


def test_inputs_that_are_reordered_by_activation_are_widened(tmp_path: Path) -> None:
    """The groups of one layer's inputs trade places together with their scales, so values stay the same."""
    folder = quantize_folder(GOLDEN / "llama", tmp_path, EXAMPLES["gptq"])
    layer = "model.layers.1.mlp.up_proj."
    stored = load_file(folder / "model.safetensors")
    changed(folder, layer + "g_idx", stored[layer + "g_idx"][::-1].copy())
    for word in ("scales", "qzeros"):
        changed(folder, layer + word, stored[layer + word][::-1].copy())
    wanted = load_arrays(folder / "plain", CONFIG, FLOAT32, report=lambda _: None)
    kept, arrays = load_kept(folder)
    widened_names = {name for name in wanted if name.endswith("gate_up")} - kept.by_name().keys()
    assert widened_names == {"layers.1.gate_up"}
    np.testing.assert_array_equal(arrays["layers.1.gate_up"], wanted["layers.1.gate_up"])


def test_a_group_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    folder = quantize_folder(GOLDEN / "llama", tmp_path, EXAMPLES["gptq"])
    changed(folder, "model.layers.1.mlp.up_proj.g_idx", np.full(64, 2, np.int32))
    with pytest.raises(StartupError, match=r"up_proj\.g_idx is corrupt: some groups are not among 2"):
        read_schemes(folder, CONFIG, 1)


@pytest.mark.parametrize(
    ("word", "tensor", "message"),
    [
        ("qzeros", None, "o_proj is quantized but has no tensor qzeros"),
        ("scales", np.zeros((3, 64), np.float16), r"o_proj\.scales is \[3, 64\], expected \[2, 64\]"),
        ("qweight", np.zeros((64, 8), np.float32), r"o_proj\.qweight is stored as F32, expected I32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    word: str, tensor: np.ndarray | None, message: str, tmp_path: Path
) -> None:
    folder = quantize_folder(GOLDEN / "llama", tmp_path, EXAMPLES["awq"])
    changed(folder, f"model.layers.0.self_attn.o_proj.{word}", tensor)
    with pytest.raises(StartupError, match=message):
        read_schemes(folder, CONFIG, 1)


@pytest.mark.parametrize("name", ["awq", "fp8-blocks"])
def test_scales_and_numbers_that_are_not_finite_are_refused(name: str, tmp_path: Path) -> None:
    folder = quantize_folder(GOLDEN / "llama", tmp_path, EXAMPLES[name])
    if name == "awq":
        changed(folder, "model.layers.0.self_attn.o_proj.scales", np.full((2, 64), np.nan, np.float16))
    else:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        at = start + header["model.layers.0.self_attn.o_proj.weight"]["data_offsets"][0]
        file.write_bytes(content[:at] + b"\x7f" + content[at + 1 :])
    with pytest.raises(StartupError, match=r"o_proj\.weight is corrupt: some values are not finite"):
        load_kept(folder)


GPTQ, CT = EXAMPLES["gptq"].config, EXAMPLES["ct-w4a16"].config
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
REFUSED = [
    ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes' is not supported; supported are awq"),
    ({}, "quant_method = None is not supported"),
    (GPTQ | {"bits": 3}, "bits = 3 is not supported"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not supported"),
    (GPTQ | {"group_size": 0}, "group_size = 0 is not an integer of at least 1"),
    (EXAMPLES["awq"].config | {"version": "gemv"}, "version = 'gemv' is not supported"),
    (EXAMPLES["fp8-128"].config | {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
    (EXAMPLES["fp8-128"].config | {"weight_block_size": [128]}, "weight_block_size = .* is not a list of 2"),
    (CT | {"format": "marlin-24"}, "format = 'marlin-24' is not supported"),
    (CT | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = .* is not supported"),
    (CT | {"config_groups": {"group_0": {"weights": NVFP4}}}, "group_0: weights = .* is not supported"),
    (
        CT | {"config_groups": {"group_0": {"weights": INT4_KIND | {"actorder": "group"}}}},
        "actorder = 'group' is not supported",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_a_way_of_quantizing_that_cannot_be_read_is_refused_before_any_weights(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    written = json.loads((GOLDEN / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"quantization_config": config}))
    with pytest.raises(StartupError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("options", "platform", "is_kept", "narrow"),
    [
        ((), "gpu", True, None),
        ((), "cpu", False, "int8"),
        (("--quantize", "keep"), "cpu", True, None),
        (("--quantize", "keep"), "gpu", True, None),
        (("--quantize", "none"), "gpu", False, None),
        (("--quantize", "int8"), "gpu", False, "int8"),
    ],
)
def test_a_quantized_checkpoint_is_kept_as_it_is_unless_the_device_or_the_operator_wants_otherwise(
    options: tuple[str, ...], platform: str, is_kept: bool, narrow: str | None, folders: Folders
) -> None:
    settings, folder = parse_settings(list(options), {}), folders("gptq")
    chosen = choose_narrow(settings, platform, folder, CONFIG)
    assert chosen == (None if narrow is None else NARROW[narrow])
    assert (chosen is None and keeps_bits(settings, platform, folder)) == is_kept


def test_bits_can_be_kept_only_where_there_are_some() -> None:
    settings = parse_settings(["--quantize", "keep"], {})
    with pytest.raises(ConfigError, match="--quantize keep: the matrices of .*llama are not quantized"):
        keeps_bits(settings, "cpu", GOLDEN / "llama")
