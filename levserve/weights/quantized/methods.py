"""The quantized formats that levserve reads, and which of them a config.json names.

A format is an entry in `METHODS` and, unless there is nothing to read, a file beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from levserve.errors import StartupError
from levserve.weights.config_fields import Fields
from levserve.weights.quantized.awq import read_awq
from levserve.weights.quantized.compressed import read_compressed
from levserve.weights.quantized.fp8 import read_fp8
from levserve.weights.quantized.gptq import read_gptq
from levserve.weights.quantized.module import Method, Module
from levserve.weights.quantized.packed_tensor import PackedTensor


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Only experts are stored in it, those of a layer in one tensor; `gpt_oss_tensors.py` opens them."""

    words = ()

    def is_quantized(self, words: Collection[str]) -> bool:
        return False

    def open(self, module: Module) -> PackedTensor:
        raise StartupError(f"{module.name}: only experts can be in MXFP4")


METHODS: dict[str, Callable[[Fields], Method]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": read_fp8,
    "compressed-tensors": read_compressed,
    "mxfp4": lambda fields: Mxfp4(),
}
KEYS = ("quantization_config", "compression_config")
"""The keys of config.json; the second is an older name."""


def find_method(config: Fields) -> Method | None:
    """How the checkpoint of this config.json is quantized; None if it is not. Refuses unknown formats."""
    for key in KEYS:
        if config.get(key) is None:
            continue
        fields = config.mapping(key)
        name = fields.get("quant_method")
        if not isinstance(name, str) or name not in METHODS:
            known = ", ".join(METHODS)
            raise StartupError(
                f"{fields.source}: quant_method = {name!r} is not supported; supported are {known}"
            )
        return METHODS[name](fields)
    return None
