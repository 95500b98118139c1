"""Reads the tensors of a Hugging Face folder whose matrices are quantized.

The tensors of a quantized layer become one `PackedTensor` under the name that its matrix would have. All
others (norms, biases, embeddings and unquantized layers) are read as usual. A layer's tensors show whether it
is quantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from levserve.errors import StartupError
from levserve.model.config import ModelConfig
from levserve.weights.hf_tensors import arrange_tensors, find_files, plain_name, read_file
from levserve.weights.quantized.module import Method, Module
from levserve.weights.row_order import ReorderedTensor, row_order
from levserve.weights.stored_tensor import Slice, StoredTensor
from levserve.weights.tensor_names import BY_HEAD, TRANSPOSED


def read_tensors(folder: Path, config: ModelConfig, method: Method) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of the checkpoint in `folder`, under its name in the table of tensor names."""
    layers: dict[str, dict[str, Slice]] = {}
    for path in find_files(folder):
        for name, stored in read_file(path):
            layer, _, word = name.rpartition(".")
            layers.setdefault(layer, {})[word] = stored
    for layer, tensors in layers.items():
        rest = tensors
        if method.is_quantized(tensors):
            yield _open(Module(f"{folder}: {layer}", tensors), f"{layer}.weight", method, config)
            rest = {word: stored for word, stored in tensors.items() if word not in method.words}
        named = [(f"{layer}.{word}" if layer else word, stored) for word, stored in rest.items()]
        yield from arrange_tensors(str(folder), named, config)


def _open(module: Module, name: str, method: Method, config: ModelConfig) -> tuple[str, StoredTensor]:
    plain = plain_name(name)
    if TRANSPOSED.fullmatch(plain) or BY_HEAD.fullmatch(plain):
        raise StartupError(f"{module.name}: quantized checkpoints of this architecture are not supported")
    tensor = method.open(module)
    order = row_order(plain, config)
    if order is not None:
        return plain, tensor.with_parts(lambda part: ReorderedTensor(part, order))
    return plain, tensor
