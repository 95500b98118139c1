"""The quantized formats that are read as they are, and what a config.json says of its own.

A format is a file beside this one and a row in `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable

from levserve.errors import StartupError
from levserve.weights.config_fields import Fields
from levserve.weights.quantized.awq import read_awq
from levserve.weights.quantized.compressed import read_compressed
from levserve.weights.quantized.fp8 import read_fp8
from levserve.weights.quantized.gptq import read_gptq
from levserve.weights.quantized.module import Method
from levserve.weights.quantized.mxfp4 import read_mxfp4

METHODS: dict[str, Callable[[Fields], Method]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": read_fp8,
    "compressed-tensors": read_compressed,
    "mxfp4": read_mxfp4,
}
KEYS = ("quantization_config", "compression_config")
"""The keys of config.json; the second is an older name."""


def find_method(config: Fields) -> Method | None:
    """How the checkpoint of this config.json is quantized; None: it is not. Refuses what cannot be read."""
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
