"""Decodes the most common kinds of GGUF blocks to float32 with functions that LLVM compiles.

The results are those of the `gguf` package, which makes many passes over the data. Each block has one or two
float16 factors, which numpy converts to float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from levserve.jit.builder import F32, I8, I32, Builder, Value
from levserve.jit.host_call import HostFunction
from levserve.jit.target import detect_target


class Group(NamedTuple):
    """Weights of a block that share a scale, and perhaps an offset."""

    codes: Value
    """int8"""
    scale: Value | None = None
    """int32: what the block's first float16 factor is multiplied by; None: 1."""
    offset: Value | None = None
    """int32: what the last factor is multiplied by; the product is subtracted. None: nothing is."""


class BlockCode(NamedTuple):
    """How blocks of one kind are read: each weight is scale * code - offset."""

    halves: tuple[int, ...]
    """The offsets of the float16 factors in a block, in bytes."""
    load: Callable[[Builder, Value], list[Group]]
    """Given a pointer to a block, its groups in order."""


def decode_blocks(packed: NDArray[np.uint8], kind: Kind) -> NDArray[np.float32]:
    """The weights in consecutive blocks of a kind in `CODES`."""
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.ascontiguousarray(packed).reshape(-1, num_bytes)
    halves = [
        np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)
        for at in CODES[kind].halves
    ]
    numbers = np.empty((len(blocks), size), np.float32)
    with _compiling:
        decode = _decoder(kind)
    decode(blocks, halves[0], halves[-1], numbers, len(blocks))
    return numbers


_compiling = Lock()
"""Threads that need a decoder at the same time wait for one of them to compile it."""


@functools.cache
def _decoder(kind: Kind) -> HostFunction:
    write = functools.partial(_write_decoder, kind=kind)
    return HostFunction(f"levserve_decode_{kind.name.lower()}", detect_target(), 5, write)


def _write_decoder(builder: Builder, *, kind: Kind) -> None:
    *pointers, count = builder.arguments
    blocks, scales, offsets, numbers = map(builder.to_pointer, pointers)
    size, num_bytes = GGML_QUANT_SIZES[kind]
    with builder.loop(0, count) as block:
        scale, offset = (builder.load(each + block * 4, F32) for each in (scales, offsets))
        at = 0
        for group in CODES[kind].load(builder, blocks + block * num_bytes):
            lanes = group.codes.lanes
            assert lanes is not None
            factor = scale if group.scale is None else scale * group.scale.convert("sitofp", F32)
            decoded = factor.splat(lanes) * group.codes.convert("sext", I32).convert("sitofp", F32)
            if group.offset is not None:
                decoded = decoded - (offset * group.offset.convert("sitofp", F32)).splat(lanes)
            builder.store(numbers + (block * size + at) * 4, decoded)
            at += lanes


def _nibbles(builder: Builder, start: Value, run: int) -> list[Value]:
    """The lower halves of `run` bytes, then their upper halves."""
    packed = builder.load(start, I8, run)
    return [packed & 15, packed >> 4]


def _q4_0(builder: Builder, block: Value) -> list[Group]:
    return [Group(each - 8) for each in _nibbles(builder, block + 2, 16)]


def _q4_1(builder: Builder, block: Value) -> list[Group]:
    return [Group(each, offset=builder.constant(-1, I32)) for each in _nibbles(builder, block + 4, 16)]


def _q5_0(builder: Builder, block: Value) -> list[Group]:
    return [Group(each - 16) for each in _five_bits(builder, block + 2)]


def _q5_1(builder: Builder, block: Value) -> list[Group]:
    return [Group(each, offset=builder.constant(-1, I32)) for each in _five_bits(builder, block + 4)]


def _five_bits(builder: Builder, start: Value) -> list[Value]:
    """32 codes that are stored as their fifth bits, in four bytes, followed by their lower four bits."""
    fifths = builder.load(start, I32).splat(16) >> builder.lane_numbers(16)
    lower, upper = _nibbles(builder, start + 4, 16)
    return [
        lower | (fifths & 1).convert("trunc", I8) << 4,
        upper | (fifths >> 16 & 1).convert("trunc", I8) << 4,
    ]


def _q8_0(builder: Builder, block: Value) -> list[Group]:
    return [Group(builder.load(block + 2, I8, 32))]


def _q4_k(builder: Builder, block: Value) -> list[Group]:
    codes = [each for at in range(16, 144, 32) for each in _nibbles(builder, block + at, 32)]
    return [Group(each, *_factors(builder, block + 4, group)) for group, each in enumerate(codes)]


def _q5_k(builder: Builder, block: Value) -> list[Group]:
    fifths = builder.load(block + 16, I8, 32)
    lower = [each for at in range(48, 176, 32) for each in _nibbles(builder, block + at, 32)]
    codes = [each | (fifths >> group & 1) << 4 for group, each in enumerate(lower)]
    return [Group(each, *_factors(builder, block + 4, group)) for group, each in enumerate(codes)]


def _factors(builder: Builder, packed: Value, group: int) -> tuple[Value, Value]:
    """The scale and the offset of one of eight groups, which twelve bytes hold in six bits each."""

    def byte(at: int) -> Value:
        return builder.load(packed + at, I8).convert("zext", I32)

    if group < 4:
        return byte(group) & 63, byte(group + 4) & 63
    both = byte(group + 4)
    return both & 15 | byte(group - 4) >> 6 << 4, both >> 4 | byte(group) >> 6 << 4


def _q6_k(builder: Builder, block: Value) -> list[Group]:
    groups = []
    for at in range(0, 256, 16):
        half, run, part = at // 128, at % 128 // 32, at % 32
        lower = builder.load(block + 64 * half + 32 * (run % 2) + part, I8, 16)
        lower = lower & 15 if run < 2 else lower >> 4
        upper = builder.load(block + 128 + 32 * half + part, I8, 16) >> 2 * run & 3
        scale = builder.load(block + 192 + at // 16, I8).convert("sext", I32)
        groups.append(Group((lower | upper << 4) - 32, scale))
    return groups


CODES = {
    Kind.Q4_0: BlockCode((0,), _q4_0),
    Kind.Q4_1: BlockCode((0, 2), _q4_1),
    Kind.Q5_0: BlockCode((0,), _q5_0),
    Kind.Q5_1: BlockCode((0, 2), _q5_1),
    Kind.Q8_0: BlockCode((0,), _q8_0),
    Kind.Q4_K: BlockCode((0, 2), _q4_k),
    Kind.Q5_K: BlockCode((0, 2), _q5_k),
    Kind.Q6_K: BlockCode((208,), _q6_k),
}
