"""Runs programs on the arrays that a model has on the device: its weights, and its state between rounds.

Belongs to the device thread. Everything that changes on the device changes in `run` and `swap`. If several
hosts serve a model, host 0 announces each run from here, and the others `repeat` it: the same programs in the
same order with the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levserve.device.model_runner import ModelRunner
from levserve.device.programs import Edit, EditKind, Programs, Shape
from levserve.device.rounds import Arrays, State
from levserve.model.placement import HostArray

Announce = Callable[[int, list[memoryview]], None]
"""Tells other hosts to run the program with this number on arrays with these bytes."""


class Executor(ModelRunner[Shape, Programs, State]):
    """Runs the programs of models that have a KV cache."""

    def __init__(self, leaves: Arrays, state: State, programs: Programs) -> None:
        super().__init__(leaves, state, programs)
        self.announce: Announce | None = None
        self.announce_swap: Callable[[], None] | None = None
        self._edits: dict[Edit, Callable[..., Any]] = {}

    def compile_first(self, report: Callable[[str], None]) -> None:
        """Compiles what is needed to serve everything, if slowly."""
        self.programs.compile_first(report)
        self._edits = {edit: self.programs.compile_edit(edit) for edit in self.programs.all_edits}

    def run(self, program: Shape | Edit, *arrays: Any) -> Any:
        """Dispatches a program with arrays of the host; returns its outputs, which are filled in later."""
        if self.announce is not None:
            self.announce(self.programs.numbers[program], [_bytes_of(array) for array in arrays])
        state = self._state
        if isinstance(program, Shape):
            self._state, outputs = self.programs[program](self._leaves, state, *arrays)
            return outputs
        edit = self._edits[program]
        match program.kind:
            case EditKind.MEMORY:
                self._state = state._replace(memory=edit(state.memory, *arrays))
            case EditKind.MASKS:
                masks, last_tokens = edit(state.masks, state.last_tokens, *arrays)
                self._state = state._replace(masks=masks, last_tokens=last_tokens)
            case EditKind.FORK:
                self._state = edit(state, *arrays)
            case EditKind.FILL:
                self._state = state._replace(pools=edit(state.pools, *arrays))

    def repeat(self, number: int, payload: bytes) -> Any:
        """Runs what another host has announced."""
        program = self.programs.numbered[number]
        arrays: list[NDArray[np.generic]] = []
        start = 0
        for argument in self.programs.arguments(program):
            array = np.frombuffer(payload, argument.dtype, argument.size, start)
            arrays.append(array.reshape(argument.shape))
            start += array.nbytes
        assert start == len(payload), f"{program} takes {start} bytes, but got {len(payload)}"
        return self.run(program, *arrays)

    def swap(self, leaves: Sequence[HostArray]) -> None:
        """Swaps weights here and on the other hosts, which have read their own parts of the same weights."""
        if self.announce_swap is not None:
            self.announce_swap()
        super().swap(leaves)


def _bytes_of(array: Any) -> memoryview:
    """The array's own memory, not a copy; numpy's buffers do not know bfloat16."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
