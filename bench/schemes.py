"""The schemes by which quantized checkpoints store their matrices, for benchmarks."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from levserve.model.cache import FP8
from levserve.model.config import ModelConfig
from levserve.model.gpu.fragment_plan import takes
from levserve.model.packed import OFFSET, SCALE, ZERO, Code, Kept, Scheme, decode
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.quantize import FP8_NAME, keep_in_fp8

FLOAT16 = jnp.dtype(jnp.float16)
SCHEMES = {
    "fp8-blocks": Scheme(Code.FP8, 128, 128, rounds_rows=True),
    "fp8-channels": Scheme(Code.FP8, rounds_rows=True),
    "fp8-weights": Scheme(Code.FP8, 128, 128),
    "w4": Scheme(Code.UINT4, 128, has_zeros=True, scale=FLOAT16, in_lanes=True),
    "w4-symmetric": Scheme(Code.UINT4, 128, zero=8, scale=FLOAT16, in_lanes=True),
    "q4_0": Scheme(Code.UINT4, 32, zero=8, scale=FLOAT16, in_lanes=True),
    "q4_k": Scheme(Code.UINT4, 32, has_offsets=True, scale=FLOAT16, in_lanes=True),
    "q6_k": Scheme(Code.INT8, 16, scale=FLOAT16, in_lanes=True),
    "q8_0": Scheme(Code.INT8, 32, scale=FLOAT16, in_lanes=True),
    "mxfp4": Scheme(Code.E2M1, 32, scale=jnp.dtype(jnp.uint8)),
}
"""FP8 in blocks as Qwen and DeepSeek publish it, with a scale per row as llm-compressor makes it, and with
activations that are left as they are; AWQ and GPTQ, GPTQ without zero points, four of GGUF's, and gpt-oss's
experts."""
ALSO_HEAD = ("q4_0", "q4_k", "q6_k", "q8_0")
"""GGUF files have a quantized head as well."""


def find_schemes(name: str, config: ModelConfig) -> dict[str, Scheme]:
    """The scheme by which each matrix of a model is stored."""
    found = {}
    for array, shape in parameter_shapes(config).items():
        kind = array.rsplit(".", 1)[-1]
        is_left = kind in ("embed", "positions", "router") or (kind == "head" and name not in ALSO_HEAD)
        is_left |= name == "mxfp4" and config.num_experts > 0 and len(shape) == 2  # as in gpt-oss
        if len(shape) > 1 and not is_left and not kind.endswith("_bias"):
            scheme = SCHEMES[name]
            # As in `weights/quantized/fp8.py`: not if the last group would be smaller.
            rounds_rows = scheme.rounds_rows and shape[-1] % (scheme.columns or 1) == 0
            in_lanes = scheme.in_lanes and takes(shape, scheme)
            found[array] = replace(scheme, rounds_rows=rounds_rows, in_lanes=in_lanes)
    return found


def choose_kept(name: str, config: ModelConfig, dtype: jnp.dtype) -> Kept | None:
    """How matrices are kept by a scheme of this name, or by the server's `--quantize fp8`; None for others."""
    if name == FP8_NAME:
        return keep_in_fp8(config, dtype)
    return Kept(tuple(find_schemes(name, config).items()), dtype) if name in SCHEMES else None


def random_parts(
    key: jax.Array, scheme: Scheme, shape: tuple[int, ...], spread: float
) -> dict[str, jax.Array]:
    """The arrays of a random matrix whose values have about this standard deviation."""
    spread_of_codes = float(jnp.std(decode(_random_codes(key, (2, 4096), scheme.code), scheme.code)))
    parts = {}
    for end, (part_shape, dtype) in scheme.array_shapes(shape).items():
        if end == "":
            parts[end] = _random_codes(key, part_shape, scheme.code)
        elif end == ZERO:
            parts[end] = jnp.full(part_shape, 8, dtype)
        elif dtype == jnp.uint8:
            parts[end] = jnp.full(part_shape, 127 + round(math.log2(spread / spread_of_codes)), dtype)
        elif end == OFFSET:
            parts[end] = jax.random.normal(key, part_shape, dtype) * dtype.type(spread)
        else:
            assert end == SCALE
            parts[end] = jnp.full(part_shape, spread / spread_of_codes, dtype)
    return parts


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_codes(key: jax.Array, shape: tuple[int, ...], code: Code) -> jax.Array:
    """Compiled as one program, so that no copy in a wider type is made."""
    if code.is_nibble:
        return jax.random.bits(key, shape, jnp.uint8)
    numbers = jax.random.normal(key, shape, jnp.bfloat16) * 24
    return numbers.astype(FP8 if code is Code.FP8 else jnp.int8)
