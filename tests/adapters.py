"""Makes small LoRA adapters in PEFT's format, and merges them into a checkpoint with NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Tensors = dict[str, NDArray[Any]]
RANK, ALPHA = 4, 6
LLAMA_MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
LLAMA = [f"model.layers.{layer}.{module}" for layer in range(3) for module in LLAMA_MODULES]


def write_adapter(folder: Path, tensors: Tensors, **fields: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


def make_halves(base: Tensors, modules: list[str], rank: int = RANK) -> Tensors:
    """A and B of each module, under PEFT's names. Products of these values are exact in any order."""
    numbers = np.random.default_rng(5)

    def draw(*shape: int) -> NDArray[np.float32]:
        return numbers.integers(-8, 9, shape).astype(np.float32) / 16

    halves: Tensors = {}
    for module in modules:
        outs, ins = base[stored_name(base, module)].shape
        if is_conv(module):
            outs, ins = ins, outs
        halves[f"base_model.model.{module}.lora_A.weight"] = draw(rank, ins)
        halves[f"base_model.model.{module}.lora_B.weight"] = draw(outs, rank)
    return halves


def is_conv(module: str) -> bool:
    """Whether the module is one of GPT-2's, whose matrices are stored [in, out]."""
    return module.startswith("transformer.h.")


def stored_name(base: Tensors, module: str) -> str:
    name = f"{module}.weight"
    return name if name in base else name.removeprefix("transformer.")


def merge(base: Tensors, halves: Tensors, modules: list[str], scale: float) -> Tensors:
    merged = dict(base)
    for module in modules:
        first, second = (halves[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
        added = np.float32(scale) * (second.astype(np.float32) @ first.astype(np.float32))
        name = stored_name(base, module)
        merged[name] = merged[name].astype(np.float32) + (added.T if is_conv(module) else added)
    return merged
