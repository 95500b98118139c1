"""The compiled programs: which shapes exist, which are ready, and the best ready one for a round.

The smallest ones are compiled before the server is ready, because several runs of them can do anything; on a
GPU the largest ones as well. Background threads compile the rest. Until a program is there, a larger one runs
in its place, or a smaller one several times. So a round never waits for a compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from levserve.device.packing import NUM_COLUMNS
from levserve.device.program_set import ProgramSet, aval
from levserve.device.rounds import (
    Arrays,
    Skeleton,
    State,
    decode_round,
    fill_pages,
    fork_slot,
    mixed_round,
    prefill_chunk,
    sample_only_prefill,
    set_masks,
    verify_round,
)
from levserve.device.sampling import SlotMasks
from levserve.device.sizing import Sizes
from levserve.model.backend import CompilerOptions
from levserve.model.placement import WHOLE
from levserve.model.sampler import Mode
from levserve.observe.metrics import Metrics

MODES = (Mode.GREEDY, Mode.PLAIN, Mode.FULL)
"""From the cheapest to the one that can do everything."""
WELL_FILLED = 0.7
"""The part of a program that must be in use. Padding takes time too, but two smaller programs take longer."""


class Shape(NamedTuple):
    """What a program is compiled for: prefill of `size` tokens, or decoding or verifying `size` rows."""

    size: int
    mode: Mode | None = None
    """How rows are sampled; None for prefill."""
    is_verify: bool = False
    is_sample_only: bool = False
    """Prefill that gives the next token and nothing else, drawn in plain mode."""
    is_mixed: bool = False
    """Decoding that prefills in the same pass."""

    @property
    def is_prefill(self) -> bool:
        return self.mode is None

    def __str__(self) -> str:
        if self.is_verify:
            return f"drafts of {self.size} rows"
        if self.mode is None:
            return f"{'sample-only ' if self.is_sample_only else ''}prefill of {self.size} tokens"
        return f"{self.mode} decode of {self.size} rows{' and prefill' if self.is_mixed else ''}"


class Programs(ProgramSet[Shape]):
    """The programs of a model with a KV cache, and the choice among those that are ready."""

    def __init__(
        self, leaves: Arrays, state: State, skeleton: Skeleton, sizes: Sizes, metrics: Metrics
    ) -> None:
        self._leaves = jax.tree.map(aval, leaves)
        self._state = jax.tree.map(aval, state)
        self._skeleton = skeleton
        self._backend = skeleton.backend
        self._sizes = sizes
        made_from = sizes, self._leaves, self._state, skeleton
        super().__init__(leaves[0], made_from, metrics)

    @property
    def first_shapes(self) -> list[Shape]:
        """What is compiled before the server is ready, the smallest prefill first."""
        chunks, rows = self._sizes.chunk_sizes, self._sizes.row_sizes
        ends = (0, -1) if self._backend.traits.warms_largest else (0,)
        prefill = [Shape(chunks[end]) for end in ends]
        decode = [Shape(rows[end], Mode.FULL) for end in ends]
        return _unique(*prefill, *decode)

    @property
    def all_shapes(self) -> list[Shape]:
        """Every program, in the order in which they are compiled."""
        sizes = self._sizes
        modes = MODES if sizes.has_all_modes else (Mode.FULL,)
        decode = [Shape(size, mode) for mode in modes for size in sizes.row_sizes]
        if sizes.mixed_tokens:
            decode = [shape._replace(is_mixed=shape.size == sizes.row_sizes[-1]) for shape in decode]
        verify = [Shape(size, Mode.FULL, is_verify=True) for size in sizes.verify_sizes]
        prefill = [Shape(size) for size in sizes.chunk_sizes]
        sample_only = []
        if sizes.has_all_modes:
            sample_only = [shape._replace(is_sample_only=True) for shape in prefill]
        return _unique(*self.first_shapes, *sample_only, *decode, *verify, *prefill)

    def prefill(self, num_tokens: int, *, can_split: bool = False, is_sample_only: bool = False) -> Shape:
        """The smallest ready program that holds `num_tokens`, or else the largest one.

        With `can_split`, tokens that would leave too much of it unused go to the largest program that they
        fill. Where only samples are wanted, of two programs of a size it is the sample-only one.
        """
        ready: dict[int, Shape] = {}
        for shape in self._ready.copy():
            if shape.is_sample_only and is_sample_only:
                ready[shape.size] = shape
            elif shape.is_prefill and not shape.is_sample_only:
                ready.setdefault(shape.size, shape)
        size = min((size for size in ready if size >= num_tokens), default=max(ready))
        if can_split and num_tokens < WELL_FILLED * size:
            size = max((size for size in ready if size <= num_tokens), default=size)
        return ready[size]

    def decode(self, num_rows: int, mode: Mode) -> Shape:
        """The narrowest ready program that serves these rows, preferably in their own mode, or the widest."""
        able = MODES[MODES.index(mode) :]
        shapes = (shape for shape in self._ready.copy() if shape.mode in able and not shape.is_verify)
        ready = sorted(shapes, key=lambda shape: (shape.size, shape.mode != mode))
        return next((shape for shape in ready if shape.size >= num_rows), ready[-1])

    def mixed(self, num_rows: int, num_tokens: int, mode: Mode) -> Shape | None:
        """A ready program that samples so many rows and prefills so many tokens, if there is one."""
        if num_tokens > self._sizes.mixed_tokens:
            return None
        able = MODES[MODES.index(mode) :]
        for shape in self._ready.copy():
            if shape.is_mixed and shape.mode in able and shape.size >= num_rows:
                return shape
        return None

    def verify(self, num_rows: int) -> Shape:
        """The smallest ready program for the drafts of so many rows, at most `max_verified`."""
        return min(shape for shape in self._ready.copy() if shape.is_verify and shape.size >= num_rows)

    @property
    def max_verified(self) -> int:
        """Rows whose drafts can be verified together; 0 until such a program is ready."""
        return max((shape.size for shape in self._ready.copy() if shape.is_verify), default=0)

    def set_masks(self, rows: int) -> Callable[..., tuple[SlotMasks, jax.Array]]:
        """The program that holds the next draws of so many rows to masks."""
        masks, last_tokens = self._state.masks, self._state.last_tokens
        packed = self._spread.argument((rows, 3), jnp.int32)
        words = self._spread.argument((rows, masks.words.shape[1]), jnp.uint32)
        given = masks, last_tokens, packed, words
        returns = masks, last_tokens
        return self._get(
            f"set {rows} masks",
            lambda: self._spread.lower(set_masks, *given, returns=returns, donate=(0, 1)),
        )

    def fork_slot(self) -> Callable[[State, object], State]:
        """The program that gives a computed prompt to one more row."""
        given = self._state, self._spread.argument((4,), jnp.int32)
        return self._get(
            "fork slot", lambda: self._spread.lower(fork_slot, *given, returns=self._state, donate=0)
        )

    def fill_pages(self) -> Callable[[Arrays, object, object], Arrays]:
        """The program that overwrites pages, as many at a time as a page table has."""
        pools = self._state.pools
        pages = self._spread.argument((self._sizes.table_width,), jnp.int32)
        value = self._spread.argument((), pools[0].dtype)
        return self._get(
            "fill pages",
            lambda: self._spread.lower(fill_pages, pools, pages, value, returns=pools, donate=0),
        )

    def lower(self, shape: Shape) -> jax.stages.Lowered:
        """A program before XLA compiles it; tests look at it too."""
        width = NUM_COLUMNS + self._sizes.table_width
        function: Callable[..., tuple[State, Any]]
        if shape.mode is None:
            function = functools.partial(
                sample_only_prefill if shape.is_sample_only else prefill_chunk, skeleton=self._skeleton
            )
            rows, chunk = self._sizes.prefill_rows(shape.size)
            packed_shape = rows, width + chunk + 1
        elif shape.is_verify:
            function = functools.partial(verify_round, skeleton=self._skeleton)
            packed_shape = shape.size, width + self._sizes.num_draft
        elif shape.is_mixed:
            function = functools.partial(
                mixed_round, skeleton=self._skeleton, num_sampled=shape.size, mode=shape.mode
            )
            packed_shape = shape.size + self._sizes.mixed_tokens, width + 1
        else:
            function = functools.partial(
                decode_round, skeleton=self._skeleton, num_steps=self._sizes.round_steps, mode=shape.mode
            )
            packed_shape = shape.size, width
        packed = self._spread.argument(packed_shape, jnp.int32)
        returns = self._state, WHOLE
        return self._spread.lower(function, self._leaves, self._state, packed, returns=returns, donate=1)

    def _compiler_options(self, shape: Shape) -> CompilerOptions:
        is_quantized = any(leaf.dtype.itemsize == 1 for leaf in self._leaves)
        return self._backend.compiler_options(
            num_tokens=shape.size, is_prefill=shape.is_prefill, is_quantized=is_quantized
        )


def _unique(*shapes: Shape) -> list[Shape]:
    return list(dict.fromkeys(shapes))
