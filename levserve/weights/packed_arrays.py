"""Decides which arrays of a model can stay quantized as in their checkpoint, and fills them.

An array stays if all tensors that fill it have one scheme, or schemes that can be joined, and if every
device's share of it has whole groups. Others are widened when they are read, as if they had not been
quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.model.aligned import aligned_array
from levserve.model.config import ModelConfig
from levserve.model.int4_blocks import FourBits, from_parts, takes
from levserve.model.lanes import to_lanes
from levserve.model.packed import OFFSET, SCALE, ZERO, Scheme, pack_nibbles
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.quantize import is_quantized
from levserve.model.sharding import find_cut, local_config
from levserve.weights.cutter import Cutter
from levserve.weights.fill import Source, fill
from levserve.weights.quantized.joined import as_joined, join
from levserve.weights.quantized.packed_tensor import Array, PackedTensor

WIDENED = ("embed", "positions")
"""Arrays that are used for lookups, not in products."""


def find_schemes(
    sources: Mapping[str, Sequence[Source]], config: ModelConfig, num_shards: int
) -> dict[str, Scheme]:
    """The scheme of each array that can stay as its checkpoint stores it."""
    shapes = parameter_shapes(local_config(config, num_shards))
    schemes = {}
    for name, filled_by in sources.items():
        scheme = _common_scheme(filled_by)
        if scheme is None or name in WIDENED:
            continue
        cut = find_cut(name, config) if num_shards > 1 else None
        num_inputs = shapes[name][-1]
        has_whole_groups = cut is None or scheme.columns is None or num_inputs % scheme.columns == 0
        if has_whole_groups and num_inputs % 2 == 0:
            schemes[name] = scheme if cut is None else replace(scheme, rows=1)
    return schemes


def find_four_bits(sources: Mapping[str, Sequence[Source]], config: ModelConfig) -> dict[str, Scheme]:
    """The schemes of the matrices that `--quantize` applies to and that can stay in four bits on a CPU."""
    schemes, shapes = find_schemes(sources, config, 1), parameter_shapes(config)
    if config.tied_head:
        head = _common_scheme(sources["embed"])
        schemes |= {} if head is None else {"head": head}
        shapes["head"] = shapes["embed"]
    return {
        name: scheme
        for name, scheme in schemes.items()
        if is_quantized(name) and takes(scheme, shapes[name][-1])
    }


def read_four_bits(
    name: str, scheme: Scheme, sources: Sequence[Source], cutter: Cutter, pool: Executor, origin: str
) -> FourBits:
    """The array of this name in four bits."""
    try:
        return from_parts(scheme, *_read_parts(name, scheme, sources, cutter, pool, origin))
    except ValueError as error:
        raise StartupError(f"{origin}: {name}: {error}: use --quantize int8-blocks") from None


def read_packed(
    name: str,
    scheme: Scheme,
    sources: Sequence[Source],
    cutter: Cutter,
    pool: Executor,
    origin: str,
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """The arrays that hold one matrix; the shares of an array that is cut come stacked."""
    codes, scales, zeros, offsets = _read_parts(name, scheme, sources, cutter, pool, origin)
    yield name, _pack(codes, scheme)
    num_shares = cutter.num_shares(name)
    for end, blocks in ((SCALE, scales), (ZERO, zeros), (OFFSET, offsets)):
        if blocks is not None:
            yield name + end, _transpose(blocks[..., :: scheme.rows, :], num_shares)


def _read_parts(
    name: str, scheme: Scheme, sources: Sequence[Source], cutter: Cutter, pool: Executor, origin: str
) -> tuple[Array, Array, Array | None, Array | None]:
    """Codes, a byte for each weight, and scales, zero points and offsets."""
    shape = cutter.host_shapes[name]
    codes = aligned_array(shape, np.dtype(scheme.code.dtype))
    scales = np.empty((*shape[:-1], scheme.num_groups(shape[-1])), np.dtype(scheme.scale))
    zeros = np.empty(scales.shape, np.uint8) if scheme.has_zeros else None
    offsets = np.empty_like(scales) if scheme.has_offsets else None
    group = scheme.columns or shape[-1]
    if cutter.has_gaps(name):
        codes[...] = 0
        scales[...] = 0
        if offsets is not None:
            offsets[...] = 0
    for source in sources:
        assert isinstance(source.tensor, PackedTensor)
        tensor = as_joined(source.tensor, scheme)
        for part, host, columns_each in (
            (tensor.codes, codes, 1),
            (tensor.scales, scales, group),
            (tensor.zeros, zeros, group),
            (tensor.offsets, offsets, group),
        ):
            if part is not None and host is not None:
                of_part = replace(source, tensor=part)
                fill(cutter.copies(name, host, of_part, columns_each), of_part, pool, origin)
    return codes, scales, zeros, offsets


def _pack(codes: NDArray[np.generic], scheme: Scheme) -> NDArray[np.generic]:
    """Packs codes [..., in], a byte each, as the scheme stores them."""
    is_nibble = scheme.code.is_nibble
    if not (is_nibble or scheme.in_lanes):
        return codes
    width = codes.shape[-1] // 2 if is_nibble else codes.shape[-1]
    packed = aligned_array((*codes.shape[:-1], width), codes.dtype)
    if scheme.in_lanes:
        to_lanes(codes, is_nibble, packed)
    else:
        pack_nibbles(codes.view(np.uint8), packed.view(np.uint8))
    return packed


def _transpose(blocks: NDArray[np.generic], num_shares: int) -> NDArray[np.generic]:
    """Transposes each of the stacked shares [..., out, group] to [..., group, out]."""
    shares = blocks.reshape(num_shares, -1, *blocks.shape[1:]).swapaxes(-1, -2)
    return np.ascontiguousarray(shares.reshape(-1, *shares.shape[2:]))


def _common_scheme(sources: Sequence[Source]) -> Scheme | None:
    """The scheme of all the tensors that fill an array; None if they have none in common."""
    schemes = set()
    for source in sources:
        if not isinstance(source.tensor, PackedTensor):
            return None
        scheme = source.tensor.scheme
        if scheme.columns == 1:  # a scale for each weight takes more memory than the weights
            return None
        schemes.add(scheme if _has_whole_blocks(source, scheme.rows) else replace(scheme, rows=1))
    rows = {scheme.rows for scheme in schemes}
    if len(rows) > 1:
        schemes = {replace(scheme, rows=1) for scheme in schemes}
    return schemes.pop() if len(schemes) == 1 else join(schemes)


def _has_whole_blocks(source: Source, rows: int) -> bool:
    """Whether the tensor's blocks of rows are also blocks of its array."""
    *_, filled = source.target.index
    assert isinstance(filled, slice)
    is_last = source.target.index[-1] == slice(0, filled.stop)
    return filled.start % rows == 0 and (filled.stop % rows == 0 or is_last)
