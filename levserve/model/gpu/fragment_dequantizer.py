"""Turns codes of four and eight bits, zero points and scales into numbers in a thread's registers, in PTX.

The bfloat16 128 with a code in its lowest bits is 128 + code, because neighbouring bfloat16 values are 1
apart there. So a mask widens two codes, and one addition subtracts the 128 and the zero point from both
of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from levserve.model.gpu.assembly import Assembly
from levserve.model.packed import Code, Scheme

ZERO_BITS = 0xC300C300
"""-128 twice, in bfloat16; with a zero point below 128 in the lowest bits it is -128 - zero."""
HALVES = 0x43004300
"""128 twice, in bfloat16; with a code in the lowest bits it is 128 + code."""
MASK_THEN_OR = "0xEA"
"""`a & b | c`, as the truth table of three bits that `lop3` takes."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Registers that a step is loaded into, while the step before is computed."""

    codes: list[list[str]]  # [output][word]
    scales: list[list[str]]  # [group][register]
    zeros: list[list[str]]
    offsets: list[list[str]]
    x: list[list[list[str]]]  # [tile of rows][word][register]


class Dequantizer:
    def __init__(self, asm: Assembly, scheme: Scheme) -> None:
        self.asm, self.scheme = asm, scheme
        self.one = asm.set("mov.b32", "0x3F803F80", name="one")
        """1 twice, in bfloat16."""
        self.minus_one = asm.set("mov.b32", "0xBF80BF80", name="minus_one")
        self.nothing = asm.set("mov.f32", "0f00000000", kind="f32", name="none")
        self.fixed_zero = asm.set("mov.b32", hex(ZERO_BITS + 0x10001 * scheme.zero), name="zero")

    def zeros(self, registers: list[str], num_outputs: int) -> list[str]:
        """-128 - zero twice, for each output; registers have a byte for each if groups have zero points."""
        if not self.scheme.has_zeros:
            return [self.fixed_zero] * num_outputs
        asm, found = self.asm, []
        for output in range(num_outputs):
            # The byte with a zero byte above it, twice.
            twice = asm.set("prmt.b32", registers[output // 4], 0, hex(0x4040 + 0x101 * (output % 4)))
            found.append(asm.set("or.b32", twice, hex(ZERO_BITS)))
        return found

    def unpack(self, word: str, zero: str) -> list[str]:
        """The values of a word, two in each register, as bfloat16."""
        asm, found = self.asm, []
        bits = 4 if self.scheme.code.is_nibble else 8
        for number in range(16 // bits):
            shifted = word if number == 0 else asm.set("shr.u32", word, bits * number)
            if self.scheme.code is Code.UINT4:
                wide = self._widen(shifted, "0x000F000F")
                found.append(asm.set("fma.rn.bf16x2", wide, self.one, zero, name="number"))
            else:
                wide = self._widen(shifted, "0x007F007F")
                base = self._widen(shifted, "0x00800080")  # 128, or 256 if the number is negative
                found.append(asm.set("fma.rn.bf16x2", base, self.minus_one, wide, name="number"))
        return found

    def _widen(self, word: str, mask: str) -> str:
        return self.asm.set("lop3.b32", word, mask, hex(HALVES), MASK_THEN_OR)

    def widen_scales(self, registers: list[str]) -> list[str]:
        """The scales as float32, one for each output."""
        if self.scheme.scale == jnp.float32:
            return [self._float32("mov.b32", register) for register in registers]
        return [wide for register in registers for wide in self._widen_pair(register)]

    def _widen_pair(self, register: str) -> tuple[str, str]:
        asm = self.asm
        if self.scheme.scale == jnp.float16:
            low, high = asm.several("half", 2, "b16")
            asm(f"mov.b32 {{{low}, {high}}}, {register}")
            return self._float32("cvt.f32.f16", low), self._float32("cvt.f32.f16", high)
        low, high = asm.set("shl.b32", register, 16), asm.set("and.b32", register, "0xFFFF0000")
        return self._float32("mov.b32", low), self._float32("mov.b32", high)

    def _float32(self, operation: str, register: str) -> str:
        return self.asm.set(operation, register, kind="f32", name="wide_scale")

    def multiply(self, sums: list[str], left: list[str], right: list[str], *, is_fresh: bool) -> None:
        """Adds a tensor-core product to the sums; if `is_fresh`, it replaces them."""
        given = [self.nothing] * 4 if is_fresh else sums
        operands = ", ".join(f"{{{', '.join(each)}}}" for each in (sums, left, right, given))
        self.asm(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {operands}")
