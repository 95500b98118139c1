"""bfloat16 numbers: rounding to them, and looking them up in a table."""

from __future__ import annotations

import math

from llvmlite import ir

from levserve.jit.builder import I16, I32, Builder, Value

HALF, NAN = 0x7FFF, 0x7FC0
"""Just under half of bfloat16's last bit, in the bits of a float32; and the bits of a quiet NaN."""
HALF_BITS, HALF_BIAS, BIAS = 3, 15, 127
"""Bits of float16's fraction that bfloat16 does not have; and what their exponents are counted from."""
TABLE = 16
"""The numbers of a table."""


def round_to_bfloat16(numbers: Value) -> Value:
    """The bits of the nearest bfloat16; ties go to the even one."""
    bits = numbers.convert("bitcast", I32)
    rounded = (bits + ((bits >> 16) & 1) + HALF) >> 16
    is_number = numbers >= -math.inf
    return is_number.select(rounded, NAN).convert("trunc", I16)


def narrow_halves(halves: Value, exponent: int) -> Value:
    """The bits of float16 numbers divided by 2 ** `exponent`, rounded to bfloat16; ties go away from 0.

    Takes four instructions: the fraction is rounded and shifted, copies of the sign are removed, and the
    exponent is counted from elsewhere. So a number that is not normal, as 0, becomes 2 ** -15 to 2 ** -14
    before the division.
    """
    rounded = halves.convert("bitcast", I16) + (1 << HALF_BITS - 1)
    sign_copies = (1 << HALF_BITS) - 1 << 15 - HALF_BITS
    return (rounded.shift_signed(HALF_BITS) & ~sign_copies) + (BIAS - HALF_BIAS - exponent << 10 - HALF_BITS)


def make_table(builder: Builder, numbers: Value) -> Value:
    """A table of 16 finite floats, rounded to bfloat16. Ties are rounded up, which takes one instruction.

    The rounded numbers are the upper halves of 32-bit words: of 32 halves, those with an odd index.
    """
    halves = (numbers.convert("bitcast", I32) + (HALF + 1)).ir_value
    return Value(builder, builder.ir.bitcast(halves, ir.VectorType(I16, 2 * TABLE)))


def odd_indices(builder: Builder, codes: Value) -> Value:
    """Where the numbers for codes of 0 to 15, which are the upper halves of 64 bytes, are in their tables: in
    the lower bytes of 32 indices, those of one table, and above them those of another."""
    indices = (((codes >> 3) & (2 * TABLE - 2)) | 1).ir_value
    return Value(builder, builder.ir.bitcast(indices, ir.VectorType(I16, 2 * TABLE)))


def look_up(builder: Builder, table: Value, indices: Value) -> Value:
    """The halves of a table at 32 indices of 16 bits each, of which the lowest five bits count."""
    if builder.target.has("avx512bw"):
        name, kind = "llvm.x86.avx512.permvar.hi.512", table.ir_value.type
        return Value(builder, builder.call_symbol(name, kind, table.ir_value, indices.ir_value))
    found = table
    for lane in range(2 * TABLE):
        place, last = ir.Constant(I32, lane), ir.Constant(I16, 2 * TABLE - 1)
        index = builder.ir.and_(builder.ir.extract_element(indices.ir_value, place), last)
        number = builder.ir.extract_element(table.ir_value, index)
        found = Value(builder, builder.ir.insert_element(found.ir_value, number, place))
    return found
