"""MXFP4: numbers of four bits, with a power of two for each 32 of them, as gpt-oss was published.

Only experts are in it, and one tensor has those of a whole layer: `gpt_oss_tensors.py` opens them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from levserve.errors import StartupError
from levserve.weights.config_fields import Fields
from levserve.weights.quantized.module import Module
from levserve.weights.quantized.packed_tensor import PackedTensor


@dataclass(frozen=True, slots=True)
class Mxfp4:
    words = ()

    def is_quantized(self, words: Collection[str]) -> bool:
        return False

    def open(self, module: Module) -> PackedTensor:
        raise StartupError(f"{module.name}: only experts can be in MXFP4")


def read_mxfp4(fields: Fields) -> Mxfp4:
    return Mxfp4()
