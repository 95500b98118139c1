"""What the runners of all kinds of models have in common: the weights and the state of a model on the device.

Belongs to the device thread.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax

from levserve.device.program_set import ProgramSet, ShapeT
from levserve.model.placement import HostArray, host_shape, put_like

Arrays = tuple[jax.Array, ...]
ProgramsT = TypeVar("ProgramsT", bound=ProgramSet[Any])
StateT = TypeVar("StateT")


class ModelRunner(ABC, Generic[ShapeT, ProgramsT, StateT]):
    """Owns the weights and every array that changes on the device."""

    def __init__(self, leaves: Arrays, state: StateT, programs: ProgramsT) -> None:
        self._leaves = leaves
        self._state = state
        self.programs = programs
        self.prefill_token_seconds = math.inf
        """Seconds per prompt token in the fastest of the programs that were timed."""

    @abstractmethod
    def _warm(self, shape: ShapeT) -> float:
        """Gives a program the runs it needs to reach full speed; returns the seconds of the last run."""

    def swap(self, leaves: Sequence[HostArray]) -> None:
        """Replaces the weights by those on the host, array by array: there is no room for two sets.

        A draft model's weights come after these in the list, and stay.
        """
        served = list(self._leaves)
        self._leaves = ()
        for old, new in zip(served, leaves):
            assert (host_shape(old), old.dtype) == (new.shape, new.dtype)
        for index, leaf in enumerate(leaves):
            served[index] = put_like(leaf, served[index].sharding).block_until_ready()
        self._leaves = tuple(served)

    def free(self) -> None:
        """Frees its memory on the device. No round may be in flight; the runner cannot be used afterwards."""
        self.programs.stop()
        for leaf in jax.tree.leaves((self._leaves, self._state)):
            leaf.delete()
        self._leaves = ()

    def warm_one(self) -> None:
        """Gives one program its first run; called when there is nothing else to do."""
        shape = self.programs.next_cold()
        if shape is not None:
            self._warm(shape)


def mask_rows(rows: int) -> list[int]:
    """The sizes of the programs that set masks."""
    return sorted({min(size, rows) for size in (1, 8, rows)})
