"""The compiled programs: which shapes exist, which are ready, and the best ready one for a round.

The smallest ones are compiled before the server is ready, because several runs of them can do anything; on a
GPU the largest ones as well. Background threads compile the rest. Until a program is ready, a larger one runs
in its place, or a smaller one several times. So a round never waits for a compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from levserve.device.draft_rounds import draft_prefill, drafted_round
from levserve.device.model_runner import mask_rows
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
from levserve.device.sizing import Sizes
from levserve.model.backend import CompilerOptions
from levserve.model.packed import Kept
from levserve.model.placement import WHOLE
from levserve.model.rules import Mode
from levserve.observe.metrics import Metrics

MODES = (Mode.GREEDY, Mode.PLAIN, Mode.FULL)
"""From the cheapest to the one that can do everything."""
WELL_FILLED = 0.7
"""The share of a program that must be in use. Padding takes time, but two smaller programs take longer."""


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
    is_draft: bool = False
    """With a draft model: prefill of it alone, or rows that it drafts for before they are verified."""

    @property
    def is_prefill(self) -> bool:
        return self.mode is None

    def __str__(self) -> str:
        if self.is_verify:
            return (
                f"{self.mode} drafting for {self.size} rows"
                if self.is_draft
                else f"drafts of {self.size} rows"
            )
        if self.is_draft:
            return f"draft prefill of {self.size} tokens"
        if self.mode is None:
            return f"{'sample-only ' if self.is_sample_only else ''}prefill of {self.size} tokens"
        return f"{self.mode} decode of {self.size} rows{' and prefill' if self.is_mixed else ''}"


class EditKind(StrEnum):
    """What a program changes between rounds."""

    MEMORY = "memory"
    """Gives a row the tokens and logit edits of its sequence."""
    MASKS = "masks"
    """Sets masks for the next draws of so many rows."""
    FORK = "fork"
    """Gives a computed prompt to one more row."""
    FILL = "fill"
    """Overwrites pages, as many at a time as a page table has."""


class Edit(NamedTuple):
    kind: EditKind
    rows: int = 0
    """How many rows get masks."""

    def __str__(self) -> str:
        names = {EditKind.MEMORY: "set memory", EditKind.FORK: "fork slot", EditKind.FILL: "fill pages"}
        return names.get(self.kind, f"set {self.rows} masks")


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
        verify = self._verify_shapes()
        prefill = [Shape(size) for size in sizes.chunk_sizes]
        sample_only = []
        if sizes.has_all_modes:
            sample_only = [shape._replace(is_sample_only=True) for shape in prefill]
        return _unique(*self.first_shapes, *sample_only, *decode, *verify, *prefill)

    def _verify_shapes(self) -> list[Shape]:
        """Drafts taken from earlier text are verified in full mode. A draft model's rounds have programs in
        plain and full mode, and it catches up with a prefill of its own."""
        sizes = self._sizes
        if not sizes.draft_turns:
            return [Shape(size, Mode.FULL, is_verify=True) for size in sizes.verify_sizes]
        modes = (Mode.PLAIN, Mode.FULL) if sizes.has_all_modes else (Mode.FULL,)
        prefill = [Shape(sizes.chunk_sizes[end], is_draft=True) for end in (0, -1)]
        rounds = [
            Shape(size, mode, is_verify=True, is_draft=True) for mode in modes for size in sizes.verify_sizes
        ]
        return [*prefill, *rounds]

    def prefill(
        self,
        num_tokens: int,
        *,
        can_split: bool = False,
        is_sample_only: bool = False,
        is_draft: bool = False,
    ) -> Shape:
        """The smallest ready program that holds `num_tokens`, or else the largest one.

        With `can_split`, if the tokens would leave too much of it unused, it is the largest program that they
        fill. With `is_sample_only`, the sample-only program of a size is preferred.
        """
        ready: dict[int, Shape] = {}
        for shape in self._ready.copy():
            if shape.is_draft is not is_draft:
                continue
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

    def verify(self, num_rows: int, mode: Mode = Mode.FULL) -> Shape:
        """The smallest ready program for the drafts of so many rows, at most `max_verified`."""
        able = MODES[MODES.index(mode) :]
        shapes = (shape for shape in self._ready.copy() if shape.is_verify and shape.mode in able)
        fitting = [shape for shape in shapes if shape.size >= num_rows]
        return min(fitting, key=lambda shape: (shape.size, shape.mode is Mode.FULL))

    @property
    def max_verified(self) -> int:
        """Rows whose drafts can be verified together, in any mode; 0 until such a program is ready."""
        ready = self._ready.copy()
        if self._sizes.draft_turns and not any(shape.is_draft and shape.is_prefill for shape in ready):
            return 0
        sizes = (shape.size for shape in ready if shape.is_verify and shape.mode is Mode.FULL)
        return max(sizes, default=0)

    @functools.cached_property
    def all_edits(self) -> list[Edit]:
        masks = [Edit(EditKind.MASKS, rows) for rows in mask_rows(self._sizes.rows)]
        return [Edit(EditKind.MEMORY), *masks, Edit(EditKind.FORK), Edit(EditKind.FILL)]

    @functools.cached_property
    def numbered(self) -> list[Shape | Edit]:
        """All programs. Hosts that serve a model together refer to a program by its index here."""
        return [*self.all_edits, *self.all_shapes]

    @functools.cached_property
    def numbers(self) -> dict[Shape | Edit, int]:
        return {program: number for number, program in enumerate(self.numbered)}

    def open_number(self, number: int) -> None:
        program = self.numbered[number]
        assert isinstance(program, Shape)  # edits are compiled before the first run
        self.open(program)

    def compile_edit(self, edit: Edit) -> Callable[..., Any]:
        """A program that takes the arrays that it changes, which are donated, and then its arguments."""
        state = self._state
        function: Callable[..., Any]
        changed: tuple[Any, ...]
        match edit.kind:
            case EditKind.MEMORY:
                return self.set_memory(state.memory)
            case EditKind.MASKS:
                function, changed = set_masks, (state.masks, state.last_tokens)
            case EditKind.FORK:
                function, changed = fork_slot, (state,)
            case EditKind.FILL:
                function, changed = fill_pages, (state.pools,)
        returns = changed[0] if len(changed) == 1 else changed
        donate = tuple(range(len(changed)))
        given = *changed, *self.arguments(edit)
        return self._get(
            str(edit), lambda: self._lowering.lower(function, *given, returns=returns, donate=donate)
        )

    def arguments(self, program: Shape | Edit) -> list[jax.ShapeDtypeStruct]:
        """The arrays that the host passes to a program."""
        argument = self._lowering.argument
        if isinstance(program, Shape):
            return [argument(self._packed_shape(program), jnp.int32)]
        state = self._state
        match program.kind:
            case EditKind.MEMORY:
                of_slot = [argument(array.shape[1:], array.dtype) for array in state.memory]
                return [argument((), jnp.int32), *of_slot]
            case EditKind.MASKS:
                words = argument((program.rows, state.masks.words.shape[1]), jnp.uint32)
                return [argument((program.rows, 3), jnp.int32), words]
            case EditKind.FORK:
                return [argument((4,), jnp.int32)]
            case EditKind.FILL:
                pages = argument((self._sizes.table_width,), jnp.int32)
                return [pages, argument(state.pools[0].shape[-1:], state.pools[0].dtype)]

    def lower(self, shape: Shape) -> jax.stages.Lowered:
        """A program before XLA compiles it; tests look at it too."""
        function: Callable[..., tuple[State, Any]]
        if shape.is_draft:
            function = self._draft_program(shape)
        elif shape.mode is None:
            function = functools.partial(
                sample_only_prefill if shape.is_sample_only else prefill_chunk, skeleton=self._skeleton
            )
        elif shape.is_verify:
            function = functools.partial(verify_round, skeleton=self._skeleton)
        elif shape.is_mixed:
            function = functools.partial(
                mixed_round, skeleton=self._skeleton, num_sampled=shape.size, mode=shape.mode
            )
        else:
            function = functools.partial(
                decode_round, skeleton=self._skeleton, num_steps=self._sizes.round_steps, mode=shape.mode
            )
        given = self._leaves, self._state, *self.arguments(shape)
        return self._lowering.lower(function, *given, returns=(self._state, WHOLE), donate=1)

    def _draft_program(self, shape: Shape) -> Callable[..., tuple[State, Any]]:
        if shape.mode is None:
            return functools.partial(draft_prefill, skeleton=self._skeleton)
        return functools.partial(
            drafted_round,
            skeleton=self._skeleton,
            num_draft=self._sizes.num_draft,
            num_turns=self._sizes.draft_turns,
            mode=shape.mode,
        )

    def _packed_shape(self, shape: Shape) -> tuple[int, int]:
        width = NUM_COLUMNS + self._sizes.table_width
        if shape.is_prefill:
            rows, chunk = self._sizes.prefill_rows(shape.size)
            return rows, width + chunk + 1
        if shape.is_verify:
            return shape.size, width + (1 if shape.is_draft else self._sizes.num_draft)
        if shape.is_mixed:
            return shape.size + self._sizes.mixed_tokens, width + 1
        return shape.size, width

    def _compiler_options(self, shape: Shape) -> CompilerOptions:
        # A draft model's matrices count only in programs in which it does most of the work.
        leaves = self._leaves if shape.is_draft else self._leaves[: len(self._skeleton.names)]
        is_quantized = any(leaf.dtype.itemsize == 1 for leaf in leaves)
        return self._backend.compiler_options(
            num_tokens=shape.size,
            is_prefill=shape.is_prefill,
            is_quantized=is_quantized and not (shape.is_prefill and self._widens_apart),
        )

    @property
    def _widens_apart(self) -> bool:
        """Whether prefill widens matrices to bfloat16 first, so that its products are those of bfloat16.

        This is so for matrices in FP8 with activations in FP8 too. Prefill of 8 x 512 tokens of an 8B
        model takes 99.9 ms on an H200 if compiled like that of a bfloat16 model, and 102.0 ms if not.
        """
        blueprint = self._skeleton.blueprint
        kept = blueprint.quantization
        return isinstance(kept, Kept) and kept.rounds_rows and blueprint.config.num_experts == 0


def _unique(*shapes: Shape) -> list[Shape]:
    return list(dict.fromkeys(shapes))
