"""The compiled programs of a model that computes whole texts, and the choice among those that are ready.

Before the server is ready there is a program for one text of each length, and one each for draws, scores and
scoring in one pass: several runs of these can serve everything. Background threads compile the others, such
as those for several texts at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from levserve.device.packing import NUM_COLUMNS
from levserve.device.program_set import ProgramSet, aval
from levserve.device.programs import MODES, WELL_FILLED
from levserve.device.sampling import SlotMasks, hold_slots
from levserve.device.text_rounds import (
    TOKENS,
    Arrays,
    TextSkeleton,
    TextState,
    draw_texts,
    run_texts,
    score_in_one_pass,
    score_texts,
)
from levserve.device.text_sizing import TextSizes
from levserve.model.backend import CompilerOptions
from levserve.model.rules import Mode
from levserve.observe.metrics import Metrics


class Task(StrEnum):
    RUN = "run"
    DRAW = "draw"
    SCORE = "score"
    ONE_PASS = "one-pass score"


class TextShape(NamedTuple):
    """What a program is compiled for: `rows` texts of `length` tokens, or `rows` draws or scores."""

    task: Task
    rows: int
    length: int = 0
    mode: Mode = Mode.FULL

    def __str__(self) -> str:
        if self.length:
            texts = "1 text" if self.rows == 1 else f"{self.rows} texts"
            return f"{self.task} of {texts} of {self.length} tokens"
        return f"{self.mode} {self.task} of {self.rows} rows"


class TextPrograms(ProgramSet[TextShape]):
    """See `ProgramSet`."""

    max_verified = 0

    def __init__(
        self, leaves: Arrays, state: TextState, skeleton: TextSkeleton, sizes: TextSizes, metrics: Metrics
    ) -> None:
        self._leaves = jax.tree.map(aval, leaves)
        self._state = jax.tree.map(aval, state)
        self._skeleton = skeleton
        self._sizes = sizes
        made_from = sizes, self._leaves, self._state, str(skeleton.tree)
        super().__init__(leaves[0], made_from, metrics)

    @property
    def first_shapes(self) -> list[TextShape]:
        sizes = self._sizes
        runs = [TextShape(Task.RUN, 1, length) for length in sizes.lengths]
        rows = sizes.row_sizes[0]
        longest = TextShape(Task.ONE_PASS, 1, sizes.lengths[-1])
        return [*runs, TextShape(Task.DRAW, rows), TextShape(Task.SCORE, rows), longest]

    @property
    def all_shapes(self) -> list[TextShape]:
        sizes = self._sizes
        modes = MODES if sizes.has_all_modes else (Mode.FULL,)
        draws = [TextShape(Task.DRAW, count, mode=mode) for mode in modes for count in sizes.row_sizes]
        runs = [
            TextShape(Task.RUN, count, length)
            for length in sizes.lengths
            for count in sizes.text_counts(length)
        ]
        scores = [TextShape(Task.SCORE, count) for count in sizes.row_sizes]
        passes = [TextShape(Task.ONE_PASS, 1, length) for length in sizes.lengths]
        return list(dict.fromkeys((*self.first_shapes, *draws, *runs, *scores, *passes)))

    def run(self, num_texts: int, length: int) -> TextShape:
        """The program for the first of these texts, all of one length: one that they fill, or nearly."""
        ready = sorted(self._counts(Task.RUN, length))
        for count in ready:
            if num_texts <= count and num_texts >= WELL_FILLED * count:
                return TextShape(Task.RUN, count, length)
        filled = [count for count in ready if count <= num_texts]
        return TextShape(Task.RUN, filled[-1], length)

    def one_pass(self, length: int) -> TextShape:
        """The shortest ready program that scores a text of this length in one pass."""
        lengths = [shape.length for shape in self._ready.copy() if shape.task is Task.ONE_PASS]
        return TextShape(Task.ONE_PASS, 1, min(one for one in lengths if one >= length))

    def score(self, num_rows: int) -> TextShape:
        """The smallest ready program that scores so many rows, or else the largest."""
        ready = sorted(self._counts(Task.SCORE))
        return TextShape(Task.SCORE, next((count for count in ready if count >= num_rows), ready[-1]))

    def draw(self, num_rows: int, mode: Mode) -> TextShape:
        """The smallest ready program that draws so many rows, if possible in their mode, or the largest."""
        able = MODES[MODES.index(mode) :]
        shapes = [shape for shape in self._ready.copy() if shape.task is Task.DRAW and shape.mode in able]
        ready = sorted(shapes, key=lambda shape: (shape.rows, shape.mode != mode))
        return next((shape for shape in ready if shape.rows >= num_rows), ready[-1])

    def hold_slots(self, rows: int) -> Callable[..., SlotMasks]:
        """The program that sets masks for the next draws of so many rows."""
        masks = self._state.masks
        packed = jax.ShapeDtypeStruct((rows, 3), jnp.int32)
        words = jax.ShapeDtypeStruct((rows, masks.words.shape[1]), jnp.uint32)
        jitted = jax.jit(hold_slots, donate_argnums=0)
        return self._get(f"hold {rows} slots", lambda: jitted.lower(masks, packed, words))

    def lower(self, shape: TextShape) -> jax.stages.Lowered:
        state = self._state
        function: Callable[..., Any]
        match shape.task:
            case Task.RUN:
                packed = jax.ShapeDtypeStruct((shape.rows, TOKENS + shape.length), jnp.int32)
                function = functools.partial(run_texts, skeleton=self._skeleton)
                return jax.jit(function, donate_argnums=1).lower(self._leaves, state.logits, packed)
            case Task.DRAW:
                packed = jax.ShapeDtypeStruct((shape.rows, NUM_COLUMNS + 1), jnp.int32)
                function = functools.partial(draw_texts, backend=self._skeleton.backend, mode=shape.mode)
                return jax.jit(function, donate_argnums=1).lower(*state, packed)
            case Task.SCORE:
                packed = jax.ShapeDtypeStruct((shape.rows, 2), jnp.int32)
                return jax.jit(score_texts).lower(state.logits, packed)
            case Task.ONE_PASS:
                packed = jax.ShapeDtypeStruct((1, TOKENS + shape.length), jnp.int32)
                function = functools.partial(score_in_one_pass, skeleton=self._skeleton)
                return jax.jit(function).lower(self._leaves, packed)

    def _counts(self, task: Task, length: int = 0) -> list[int]:
        return [shape.rows for shape in self._ready.copy() if shape.task is task and shape.length == length]

    def _compiler_options(self, shape: TextShape) -> CompilerOptions:
        return self._skeleton.backend.compiler_options(
            num_tokens=shape.rows * max(shape.length, 1),
            is_prefill=shape.length > 0,
            is_quantized=False,
        )
