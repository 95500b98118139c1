"""Makes golden folders of quantized checkpoints in tests/golden, each with the tool that people use for it.

Not a test. Each folder has config.json and model.safetensors as the tool writes them, and golden.json: the
tokens and log-probabilities of a forward pass in float32 on a CPU, with the weights that the tool itself
reads back from its file. Where activations are quantized as well, the forward pass is the tool's own. So a
reader that misunderstands a format is not checked against its own mistake.

It needs a separate environment:

    pip install torch==2.13.0 transformers==5.22.2 compressed-tensors==0.20.0 accelerate
    pip install logbar device-smi tokenicer threadpoolctl pypcre defuser torchao datasets requests pillow

and three source packages of PyPI, unpacked side by side in a folder (installing them would need CUDA, this
does not): autoawq-0.2.9, auto_gptq-0.7.1, gptqmodel-7.7.0. Run it from the repository's root, with the names
of the folders to make (default: all):

    GPTQMODEL_CPU_WORKERS=4 python tests/make_quantized_golden.py --sources FOLDER [NAME ...]
"""

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from make_golden import GOLDEN, SMALLEST_GAP, TINY, VOCAB, golden_of, randomize
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

CONFIG = LlamaConfig(**TINY | {"num_hidden_layers": 2}, tie_word_embeddings=True)
GROUP = 32
Matrices = dict[str, torch.Tensor]
"""The matrices that a tool has read from its file, by the name of their layer, [out, in] in float32."""
Make = Callable[[PreTrainedModel, Path], Matrices | PreTrainedModel]
"""Quantizes a model, writes it to a folder and reads it back: as matrices, or as a model that computes like
the tool."""


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def save(model: PreTrainedModel, folder: Path, quantization: dict[str, object]) -> None:
    """Writes a model whose layers a tool has replaced: its state, and the tool's settings in config.json."""
    tensors = {
        name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": quantization,
        "dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def load_state(module: nn.Module, folder: Path, name: str) -> nn.Module:
    """Fills a tool's layer from the file."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    start = name + "."
    module.load_state_dict(
        {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
    )
    return module


# AutoAWQ


def awq(*, group_size: int = GROUP) -> Make:
    def make(model: PreTrainedModel, folder: Path) -> Matrices:
        from awq.models._config import AwqConfig
        from awq.modules.linear.gemm import WQLinear_GEMM
        from awq.quantize.quantizer import AwqQuantizer
        from awq.utils.packing_utils import dequantize_gemm

        settings = types.SimpleNamespace(w_bit=4, zero_point=True, group_size=group_size)
        matrices = {}
        for name, layer in linear_layers(model).items():
            layer.weight.data, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(
                settings, layer.weight.data
            )
            size = layer.in_features if group_size == -1 else group_size
            packed = WQLinear_GEMM.from_linear(layer, 4, size, scales=scales.t(), zeros=zeros.t())
            replace(model, name, packed)
        config = AwqConfig(q_group_size=group_size)
        save(model, folder, config.to_transformers_dict())
        for name, layer in model.named_modules():
            if isinstance(layer, WQLinear_GEMM):
                read = load_state(layer, folder, name)
                # AutoAWQ multiplies in float16; with scales in float32 its code gives the weights unrounded.
                numbers = dequantize_gemm(read.qweight, read.qzeros, read.scales.float(), 4, read.group_size)
                matrices[name] = numbers.t()
        return matrices

    return make


# AutoGPTQ


def autogptq(model: PreTrainedModel, folder: Path) -> Matrices:
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear
    from auto_gptq.quantization.quantizer import Quantizer

    for name, layer in linear_layers(model).items():
        scales, zeros = [], []
        for start in range(0, layer.in_features, GROUP):
            quantizer = Quantizer()
            quantizer.configure(bits=4, perchannel=True, sym=True)
            part = slice(start, start + GROUP)
            quantizer.find_params(layer.weight.data[:, part].float(), weight=True)
            layer.weight.data[:, part] = quantizer.quantize(layer.weight.data[:, part].float())
            scales.append(quantizer.scale)
            zeros.append(quantizer.zero)
        packed = QuantLinear(4, GROUP, layer.in_features, layer.out_features, bias=False)
        packed.pack(layer, torch.cat(scales, 1), torch.cat(zeros, 1), None)
        replace(model, name, packed)
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    save(model, folder, config)
    matrices = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            read = load_state(layer, folder, name)
            read.scales = read.scales.float()
            # Its forward pass unpacks the matrix and multiplies: given the identity, it returns the matrix.
            matrices[name] = read(torch.eye(read.infeatures)).t()
    return matrices


# GPTQModel


def gptqmodel(*, checkpoint_format: str, sym: bool, desc_act: bool = False) -> Make:
    def make(model: PreTrainedModel, folder: Path) -> Matrices:
        from gptqmodel import GPTQModel, QuantizeConfig
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear

        generator = torch.Generator().manual_seed(1)
        texts = torch.randint(3, VOCAB, (64, 64), generator=generator).tolist()
        config = QuantizeConfig(
            bits=4, group_size=GROUP, sym=sym, desc_act=desc_act, format=checkpoint_format
        )
        with tempfile.TemporaryDirectory() as plain:
            model.save_pretrained(plain)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(GOLDEN / "llama" / file, plain)
            quantized = GPTQModel.load(plain, config, device="cpu")
            quantized.quantize(
                [{"input_ids": text, "attention_mask": [1] * 64} for text in texts], batch_size=8
            )
            quantized.save(str(folder))
        read = GPTQModel.load(str(folder), backend="gptq_torch", device="cpu", dtype=torch.float16)
        matrices = {}
        for name, layer in read.model.named_modules():
            if isinstance(layer, TorchLinear):
                layer.scales = layer.scales.float()
                matrices[name] = layer.dequantize_weight().t()
        return matrices

    return make


# compressed-tensors


def compressed(*, form: str, activations: dict[str, object] | None = None, **arguments: object) -> Make:
    def make(model: PreTrainedModel, folder: Path) -> Matrices | PreTrainedModel:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            apply_quantization_config,
        )

        weights = QuantizationArgs(**arguments)
        inputs = None if activations is None else QuantizationArgs(**activations)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
        apply_quantization_config(
            model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
        )
        for layer in linear_layers(model).values():
            calibrate(layer, weights)
        compressor = ModelCompressor.from_pretrained_model(model, form)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))
        read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        read(torch.tensor([[1]]))  # layers are decompressed for the first forward pass
        if activations is not None:
            return read.eval()
        return {name: layer.weight.data for name, layer in linear_layers(read).items()}

    return make


def calibrate(layer: nn.Linear, weights: object) -> None:
    """Sets scales and zero points by the extreme weights of each group, channel, block or matrix."""
    from compressed_tensors.quantization.utils import calculate_qparams

    rows, columns = {
        "tensor": layer.weight.shape,
        "channel": (1, layer.in_features),
        "group": (1, weights.group_size),
        "block": weights.block_structure,
    }[weights.strategy]
    blocks = layer.weight.data.unfold(0, rows, rows).unfold(1, columns, columns).flatten(2)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights)
    layer.weight_scale.data = scale.reshape(layer.weight_scale.shape).to(layer.weight_scale.dtype)
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data = zero.reshape(layer.weight_zero_point.shape).to(
            layer.weight_zero_point.dtype
        )


# transformers


def fine_grained_fp8(*, block: list[int] | None, scheme: str = "dynamic") -> Make:
    def make(model: PreTrainedModel, folder: Path) -> Matrices:
        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

        config = FineGrainedFP8Config(weight_block_size=block, activation_scheme=scheme)
        quantizer = types.SimpleNamespace(quantization_config=config)
        tensors = {}
        for name, tensor in model.state_dict().items():
            if name.removesuffix(".weight") in linear_layers(model):
                made = Fp8Quantize(quantizer).convert({name: tensor})
                if block is None:  # a scalar, as FP8Linear has it
                    made[f"{name}_scale_inv"] = made[f"{name}_scale_inv"].reshape(())
                if scheme == "static":
                    made[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.25)
                tensors |= made
            elif name != "lm_head.weight":
                tensors[name] = tensor
        model.save_pretrained(folder)
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        written = json.loads((folder / "config.json").read_text())
        written["quantization_config"] = config.to_dict()
        (folder / "config.json").write_text(json.dumps(written, indent=2))
        dequantize = Fp8Dequantize(quantizer)
        read = safetensors.torch.load_file(folder / "model.safetensors")
        matrices = {}
        for name in linear_layers(model):
            parts = {word: read[f"{name}.{word}"] for word in ("weight", "weight_scale_inv")}
            (matrices[name],) = dequantize.convert(parts).values()
        return matrices

    return make


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FP8 = {"num_bits": 8, "type": "float"}
FOLDERS: dict[str, Make] = {
    "awq": awq(),
    "awq-rows": awq(group_size=-1),
    "gptq-autogptq": autogptq,
    "gptq": gptqmodel(checkpoint_format="gptq", sym=True),
    "gptq-zeros": gptqmodel(checkpoint_format="gptq", sym=False),
    "gptq-v2-zeros": gptqmodel(checkpoint_format="gptq_v2", sym=False),
    "gptq-desc-act": gptqmodel(checkpoint_format="gptq", sym=True, desc_act=True),
    "ct-fp8-channel": compressed(form="float-quantized", strategy="channel", **FP8),
    "ct-fp8-tensor": compressed(form="float-quantized", strategy="tensor", **FP8),
    "ct-fp8-block": compressed(form="float-quantized", strategy="block", block_structure=[32, 32], **FP8),
    "ct-fp8-channel-dynamic": compressed(
        form="float-quantized",
        strategy="channel",
        activations=FP8 | {"strategy": "token", "dynamic": True},
        **FP8,
    ),
    "ct-fp8-block-dynamic": compressed(
        form="float-quantized",
        strategy="block",
        block_structure=[32, 32],
        activations=FP8 | {"strategy": "group", "group_size": GROUP, "dynamic": True},
        **FP8,
    ),
    "ct-int8": compressed(form="int-quantized", num_bits=8, type="int", strategy="channel"),
    "ct-w4a16": compressed(form="pack-quantized", **INT4),
    "ct-w4a16-zeros": compressed(form="pack-quantized", symmetric=False, **INT4),
    "ct-w8a16": compressed(form="pack-quantized", **INT4 | {"num_bits": 8}),
    "fp8-blocks": fine_grained_fp8(block=[32, 32]),
    "fp8-tensor": fine_grained_fp8(block=None, scheme="static"),
}


def find_tools(sources: Path) -> None:
    """Makes the source packages importable, without the parts that need CUDA or an older transformers."""
    for name, folder in (
        ("awq", "autoawq-0.2.9/awq"),
        ("awq.quantize", "autoawq-0.2.9/awq/quantize"),
        ("awq.models", "autoawq-0.2.9/awq/models"),
        ("auto_gptq", "auto_gptq-0.7.1/auto_gptq"),
        ("auto_gptq.quantization", "auto_gptq-0.7.1/auto_gptq/quantization"),
    ):
        package = types.ModuleType(name)
        package.__path__ = [str(sources / folder)]
        sys.modules[name] = package
    sys.path.insert(0, str(sources / "gptqmodel-7.7.0"))
    importlib.invalidate_caches()


def make_folder(name: str, make: Make) -> None:
    folder = GOLDEN / "quantized" / name
    for seed in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        generator = torch.Generator().manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager")
        randomize(model, generator)
        make_extreme(model)
        made = make(model.half(), folder)
        read = made if isinstance(made, PreTrainedModel) else read_plain(folder, made)
        golden = golden_of(name, read, generator)
        if float(golden["smallest_top2_gap"]) > SMALLEST_GAP:
            break
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    (folder / "golden.json").write_text(json.dumps(golden))
    print(name, "seed", seed, "gap", golden["smallest_top2_gap"], flush=True)


def make_extreme(model: PreTrainedModel) -> None:
    """Gives the weights of some rows one sign, so that their zero points are the smallest and the largest."""
    for layer in linear_layers(model).values():
        layer.weight.data[::5].abs_()
        layer.weight.data[3::7].abs_().neg_()


def read_plain(folder: Path, matrices: Matrices) -> PreTrainedModel:
    """The model in float32, with the tool's matrices and the other tensors of the file."""
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager").eval().float()
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    state = {name: tensor for name, tensor in tensors.items() if name in model.state_dict()}
    state |= {f"{name}.weight": matrix.float() for name, matrix in matrices.items()}
    missing = model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=False)
    assert missing.missing_keys == ["lm_head.weight"], missing
    model.tie_weights()
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("names", nargs="*", default=list(FOLDERS), metavar="NAME")
    options = parser.parse_args()
    find_tools(options.sources)
    for name in options.names:
        make_folder(name, FOLDERS[name])
