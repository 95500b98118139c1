"""GGUF files whose matrices stay in their own bits: every kind of block, fused arrays, and a model's text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from haliax import Axis
from safetensors.numpy import load_file

import levserve
from levserve.model.config import ModelConfig
from levserve.model.gpu import backend as gpu
from levserve.model.lanes import to_lanes
from levserve.model.packed import OFFSET, SCALE, Code, Kept, PackedMatrix, Scheme, pack_nibbles
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.placement import make_mesh
from levserve.model.sharding import local_config
from levserve.models.matrices import arrange
from levserve.weights.checkpoint import load_arrays, read_config, read_schemes
from levserve.weights.gguf_tensors import read_tensors
from levserve.weights.quantized.gguf import FORMS
from levserve.weights.quantized.packed_tensor import PackedTensor
from tests.conftest import GOLDEN
from tests.engines import cache_folder
from tests.tiny.test_gguf import metadata_of, random_blocks, tensors_of, write_gguf
from tests.tiny.test_opened_model import CASES, SETTINGS
from tests.tiny.test_packed import widen

BFLOAT16, FLOAT16, FLOAT32 = (jnp.dtype(each) for each in (jnp.bfloat16, jnp.float16, jnp.float32))
K_KINDS = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
OF_FOUR_BITS = Scheme(Code.UINT4, 32, has_offsets=True, scale=FLOAT16)


@pytest.mark.parametrize("in_lanes", [False, True])
@pytest.mark.parametrize("kind", [kind for kind, form in FORMS.items() if 2 in form.axes])
def test_every_number_is_the_one_that_the_file_means(kind: Kind, in_lanes: bool, tmp_path: Path) -> None:
    """Scales of 256 values are rounded to 16 bits: one part in 2,048. Rows are put in order as well."""
    stored = {"blk.0.attn_q.weight": (random_blocks(kind, 32, 2 if kind in K_KINDS else 16), kind)}
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, stored)
    tensor = dict(read_tensors(path, head_dim=16))["blk.0.attn_q.weight"]
    assert isinstance(tensor, PackedTensor) and tensor.shape == (32, 512)
    matrix = on_device(tensor, in_lanes)
    got, wanted = np.asarray(widen(matrix), np.float64), tensor.read(0, 32)
    if kind not in K_KINDS:
        np.testing.assert_array_equal(got, wanted)
    scales, offsets = (
        np.zeros(()) if part is None else np.abs(np.asarray(part, np.float64)).max()
        for part in (matrix.scale, matrix.offset)
    )
    np.testing.assert_allclose(got, wanted, atol=(scales * 32 + offsets) / 2048)
    assert np.abs(got - wanted).max() < 1e-3 * np.abs(wanted).max()


def on_device(tensor: PackedTensor, in_lanes: bool) -> PackedMatrix:
    num_rows, num_inputs = tensor.shape
    codes, is_nibble = tensor.codes.read(0, num_rows), tensor.scheme.code.is_nibble
    packed = np.empty((num_rows, num_inputs // 2 if is_nibble else num_inputs), codes.dtype)
    if in_lanes:
        to_lanes(codes, is_nibble, packed)
    elif is_nibble:
        pack_nibbles(codes, packed)
    else:
        packed = codes
    parts = {"": packed, SCALE: tensor.scales.read(0, num_rows).T}
    if tensor.offsets is not None:
        parts[OFFSET] = tensor.offsets.read(0, num_rows).T
    scheme = replace(tensor.scheme, in_lanes=in_lanes)
    axes = (Axis("out", num_rows), Axis("in", num_inputs))
    return PackedMatrix.from_arrays({end: jnp.asarray(part) for end, part in parts.items()}, scheme, axes)


def quantized_file(folder: Path, kinds: dict[str, Kind], others: Kind, family: str = "llama") -> Path:
    """A golden model with its matrices in `others`, except those whose names end in a key of `kinds`."""
    tensors = tensors_of(family)
    for name, (tensor, _) in tensors.items():
        if tensor.ndim > 1 and not name.endswith("ffn_gate_inp.weight"):
            kind = next((kind for end, kind in kinds.items() if name.endswith(end)), others)
            tensors[name] = (quants.quantize(tensor, kind), kind)
    return write_gguf(folder / "model.gguf", metadata_of(family), tensors)


def check_numbers(path: Path, config: ModelConfig, kept: Kept) -> None:
    plain = load_arrays(path, config, FLOAT32, report=print)
    arrays = load_arrays(path, config, FLOAT32, report=print, quantization=kept)
    for name, scheme in kept.schemes:
        axes = [Axis(f"axis{number}", size) for number, size in enumerate(parameter_shapes(config)[name])]
        matrix = PackedMatrix.from_arrays(arrays, scheme, tuple(axes), name)
        np.testing.assert_array_equal(widen(matrix), plain[name], err_msg=name)
        assert scheme.num_bytes(plain[name].shape) < 0.7 * plain[name].nbytes / 2, "of what bfloat16 takes"


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_each_device_gets_its_part_of_all_that_belongs_to_a_matrix(kind: Kind, tmp_path: Path) -> None:
    path = quantized_file(tmp_path, {}, kind)
    config = read_config(path)
    schemes = read_schemes(path, config, 2)
    kept = Kept(tuple(schemes.items()), FLOAT32)
    mesh = make_mesh(jax.devices()[:2])
    arrays = load_arrays(path, config, FLOAT32, report=print, quantization=kept, mesh=mesh)
    shapes = parameter_shapes(local_config(config, 2))
    for name, scheme in schemes.items():
        for end, (shape, _) in scheme.array_shapes(shapes[name]).items():
            array = arrays[name + end]
            assert array.sharding.shard_shape(array.shape) == shape, name + end


def test_tensors_of_several_kinds_are_joined_in_one_array(tmp_path: Path) -> None:
    """As in files of K-quants: values have more bits than queries and keys."""
    path = quantized_file(tmp_path, {"attn_v.weight": Kind.Q8_0, "ffn_up.weight": Kind.Q4_0}, Kind.Q4_1)
    config = read_config(path)
    schemes = read_schemes(path, config, 1)
    matrices = {name for name, shape in parameter_shapes(config).items() if len(shape) > 1} - {"embed"}
    assert schemes.keys() == matrices
    assert schemes["layers.0.down"] == schemes["layers.0.out"] == OF_FOUR_BITS
    joined = Scheme(Code.INT8, 32, has_offsets=True, scale=FLOAT16)
    assert schemes["layers.0.qkv"] == schemes["layers.0.gate_up"] == joined
    check_numbers(path, config, Kept(tuple(schemes.items()), FLOAT32))


def test_what_is_not_quantized_is_widened_with_what_it_is_fused_with(tmp_path: Path) -> None:
    path = quantized_file(tmp_path, {"attn_k.weight": Kind.F16}, Kind.Q8_0)
    schemes = read_schemes(path, read_config(path), 1)
    assert "layers.0.qkv" not in schemes and schemes["layers.0.out"] == Scheme(Code.INT8, 32, scale=FLOAT16)


def test_a_card_keeps_what_a_kernel_reads_and_widens_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 64 values in four bits with offsets are too short for the kernel; those of 128 are not."""
    path = quantized_file(tmp_path, {}, Kind.Q4_1)
    config = read_config(path)
    stored = Kept(tuple(read_schemes(path, config, 1).items()), BFLOAT16)
    monkeypatch.setattr(gpu, "runs_here", lambda: True)
    kept = arrange(stored, gpu.GpuBackend(), config)
    assert kept is not None
    assert {name.rsplit(".", 1)[-1] for name, _ in kept.schemes} == {"down"}
    assert all(scheme.in_lanes for _, scheme in kept.schemes)
    check_numbers(path, config, kept)
    everything = arrange(stored, gpu.GpuBackend(), config, keeps_all=True)
    assert everything is not None and everything.by_name().keys() == stored.by_name().keys()
    monkeypatch.setattr(gpu, "runs_here", lambda: False)
    assert arrange(stored, gpu.GpuBackend(), config) is None


def test_an_engine_that_keeps_the_bits_writes_the_text_of_the_widened_file(tmp_path: Path) -> None:
    path = quantized_file(tmp_path, {"attn_v.weight": Kind.Q8_0, "ffn_down.weight": Kind.Q8_0}, Kind.Q4_1)
    texts = []
    for quantize in ("none", "keep"):
        given = {"tokenizer": str(GOLDEN / "llama"), "quantize": quantize, **SETTINGS}
        with levserve.open(path, cache_dir=cache_folder(), **given) as model:
            prompts = [case["prompt"] for case in CASES]
            results = model.generate(prompts, max_tokens=24, temperature=0, ignore_eos=True)
            texts.append([list(result.tokens) for result in results])
    assert texts[0] == texts[1]
    assert all(len(tokens) == 24 for tokens in texts[1])


def test_experts_stay_in_their_bits_too(tmp_path: Path) -> None:
    path = quantized_file(tmp_path, {"ffn_up_exps.weight": Kind.Q8_0}, Kind.Q4_1, "qwen3-moe")
    config = read_config(path)
    schemes = read_schemes(path, config, 1)
    assert schemes["layers.0.experts_down"] == OF_FOUR_BITS
    assert schemes["layers.0.experts_gate_up"] == Scheme(Code.INT8, 32, has_offsets=True, scale=FLOAT16)
    check_numbers(path, config, Kept(tuple(schemes.items()), FLOAT32))


def test_experts_in_mxfp4_stay_in_it(tmp_path: Path) -> None:
    """As llama.cpp's converter writes gpt-oss: the bits of the published checkpoint in another order."""
    folder = GOLDEN / "gpt-oss-mxfp4"
    stored = load_file(folder / "model.safetensors")
    tensors = {name: part for name, part in tensors_of("gpt-oss").items() if "_exps.weight" not in name}
    for layer in range(2):
        for name, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
            whole = f"model.layers.{layer}.mlp.experts.{name}_proj"
            blocks = as_blocks(stored[f"{whole}_blocks"], stored[f"{whole}_scales"])
            for number, part in enumerate(parts):
                rows = np.ascontiguousarray(blocks[:, number :: len(parts)])
                tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = rows, Kind.MXFP4
    path = write_gguf(tmp_path / "model.gguf", metadata_of("gpt-oss"), tensors)
    config = read_config(path)
    schemes = read_schemes(path, config, 1)
    assert schemes == read_schemes(folder, read_config(folder), 1)
    kept = Kept(tuple(schemes.items()), FLOAT32)
    arrays, expected = (
        load_arrays(at, config, FLOAT32, report=print, quantization=kept) for at in (path, folder)
    )
    assert len(schemes) == 4
    for name in (array for array in expected if "experts_" in array and "bias" not in array):
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)
    check_numbers(path, config, kept)


def as_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows [expert, out, byte] of GGUF's blocks: a scale, then each value with the one 16 places after it."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], packed], axis=-1).reshape(*blocks.shape[:2], -1)
