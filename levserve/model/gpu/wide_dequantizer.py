"""Widens codes to bfloat16 and applies their scales and offsets in a thread's registers, in PTX."""

from __future__ import annotations

import jax.numpy as jnp

from levserve.model.gpu.assembly import Assembly
from levserve.model.gpu.fragment_dequantizer import Dequantizer
from levserve.model.packed import Scheme


class WideDequantizer:
    """A code less its zero point is exact. Scales and offsets are rounded to bfloat16; one fused
    multiply-add applies both and rounds the result."""

    def __init__(self, asm: Assembly, scheme: Scheme) -> None:
        self.asm, self.scheme = asm, scheme
        self.dequantizer = Dequantizer(asm, scheme)
        self.none = asm.set("mov.b32", "0x80008000", name="none")
        """-0 twice; adding it changes nothing."""
        self.scales: list[str] = []
        self.zeros: list[str] = []
        self.offsets: list[str] = []

    def begin_group(
        self, scales: list[str], zeros: list[str], offsets: list[str], *, num_outputs: int
    ) -> None:
        """Takes the scales, zero points and offsets for the next words, in registers as they were loaded."""
        self.scales, self.offsets = self._twice(scales), self._twice(offsets)
        self.zeros = self.dequantizer.zeros(zeros, num_outputs)

    def widen(self, word: str, output: int) -> list[str]:
        """The values of a word, two in each register; not scaled if all inputs share a scale."""
        exact = self.dequantizer.unpack(word, self.zeros[output])
        if not self.scales:
            return exact
        offset = self.offsets[output] if self.offsets else self.none
        return [
            self.asm.set("fma.rn.bf16x2", number, self.scales[output], offset, name="number")
            for number in exact
        ]

    def _twice(self, registers: list[str]) -> list[str]:
        """Each value as bfloat16, twice in a register."""
        asm = self.asm
        if self.scheme.scale == jnp.bfloat16:
            return [
                asm.set("prmt.b32", register, 0, half, name="twice")
                for register in registers
                for half in ("0x1010", "0x3232")
            ]
        wide = self.dequantizer.widen_scales(registers)
        return [asm.set("cvt.rn.bf16x2.f32", number, number, name="twice") for number in wide]
