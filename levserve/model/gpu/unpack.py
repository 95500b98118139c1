"""Widens codes of four or eight bits to bfloat16 in registers, for kernels that multiply packed matrices.

A GPU's own conversion takes one value at a time and is slow. Here two are converted at once, by putting their
bits where bfloat16 has them: `0x4300 | code` is 128 + code for a code below 128, and the bits of a small
float are those of a bfloat16 that is too small by a power of two. All results are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from levserve.model.packed import Code, decode

UINT4_OFFSET = 128
"""What widening adds to a code of `UINT4`; the zero point, which is subtracted then, must include it."""


MINUS_ONE, MINUS_ZERO = "0xBF80BF80", "0x80008000"
"""-1 and -0 as bfloat16, twice."""


class Steps(NamedTuple):
    """Instructions that widen two codes."""

    beside: str
    """The byte that is put beside each code to make 16 bits, four times."""
    is_high: bool
    """Whether the code is in the higher byte."""
    compute: str
    """Computes the result `{out}` from `a`, which has both codes; may use `c`. `{zero}` has the value to
    subtract, twice, and `k` has `constant`. Fused multiply-adds take the place of sums and products, which
    GPUs before Hopper do not have for bfloat16."""
    constant: str


STEPS = {
    Code.UINT4: Steps(
        "0x43434343", False, "and.b32 a, a, 0xFF0FFF0F; fma.rn.bf16x2 {out}, {zero}, k, a;", MINUS_ONE
    ),
    # The eighth bit turns the 128 that is subtracted into 256.
    Code.INT8: Steps(
        "0x43434343",
        False,
        "and.b32 c, a, 0xFF80FF80; and.b32 a, a, 0xFF7FFF7F; fma.rn.bf16x2 {out}, c, k, a;",
        MINUS_ONE,
    ),
    Code.FP8: Steps(
        "0",
        True,
        "and.b32 c, a, 0x80008000; shr.b32 a, a, 4; lop3.b32 a, a, 0x07F007F0, c, 0xEA; "
        "mov.b32 c, 0x7B807B80; fma.rn.bf16x2 {out}, a, c, k;",  # 2 ** 120
        MINUS_ZERO,
    ),
    Code.E2M1: Steps(
        "0",
        True,
        "and.b32 c, a, 0x80008000; shr.b32 a, a, 6; lop3.b32 a, a, 0x01C001C0, c, 0xEA; "
        "mov.b32 c, 0x7E807E80; fma.rn.bf16x2 {out}, a, c, k;",  # 2 ** 126
        MINUS_ZERO,
    ),
}
LOW_SELECTORS = ("0x4140", "0x4342")
HIGH_SELECTORS = ("0x1404", "0x3424")
"""Which bytes `prmt` takes for the first two codes of a register, and for the next two."""


def assembly(code: Code, is_second: bool, pack: int) -> str:
    """PTX that widens `pack` bytes, 2 or 4, to as many bfloat16; of nibbles, the first or the second of each.

    The operands are the results, two values each, then the bytes, then as many zero points as results.
    """
    steps, count = STEPS[code], pack // 2
    lines = [f"cvt.u32.u16 w, ${count};" if pack == 2 else f"mov.b32 w, ${count};"]
    lines.append(f"mov.b32 k, {steps.constant};")
    if code is Code.UINT4 and is_second:
        lines.append("shr.b32 w, w, 4;")
    if code is Code.E2M1 and not is_second:
        lines.append("shl.b32 w, w, 4;")
    selectors = HIGH_SELECTORS if steps.is_high else LOW_SELECTORS
    for number in range(count):
        lines.append(f"prmt.b32 a, w, {steps.beside}, {selectors[number]};")
        lines.append(steps.compute.format(out=f"${number}", zero=f"${count + 1 + number}"))
    return "{ .reg .b32 w, a, c, k; " + " ".join(lines) + " }"


def unpack(codes: jax.Array, code: Code, zeros: tuple[jax.Array, ...], pack: int) -> tuple[jax.Array, ...]:
    """Bytes [column, n] as bfloat16 arrays of the same shape: one, or with nibbles one of the first value of
    each byte and one of the second.

    `zeros`, only for `UINT4`, has an array [column] to subtract from each of these; it is bfloat16 and
    includes `UINT4_OFFSET`.
    """
    parts = []
    for number in range(2 if code.is_nibble else 1):
        zero = zeros[number] if zeros else None
        parts.append(_unpack_part(codes, code, number == 1, zero, pack))
    return tuple(parts)


def _unpack_part(
    codes: jax.Array, code: Code, is_second: bool, zero: jax.Array | None, pack: int
) -> jax.Array:
    given = [codes] if zero is None else [codes, jnp.broadcast_to(zero[:, None], codes.shape)]
    register = "h" if pack == 2 else "r"
    results = ["=&r"] * (pack // 2)
    (wide,) = plgpu.elementwise_inline_asm(
        assembly(code, is_second, pack),
        args=given,
        constraints=",".join([*results, register, *(["r"] * (pack // 2) if zero is not None else [])]),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return wide


def unpack_plainly(codes: jax.Array, code: Code, zeros: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same without assembly, for jax's interpreter."""
    numbers = jnp.split(decode(codes, code), 2 if code.is_nibble else 1, axis=1)
    if zeros:
        numbers = [
            part - (zero[:, None].astype(jnp.float32) - UINT4_OFFSET)
            for part, zero in zip(numbers, zeros, strict=True)
        ]
    return tuple(part.astype(jnp.bfloat16) for part in numbers)
