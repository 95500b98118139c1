"""What crosses to the device thread: frozen messages through one queue."""

from __future__ import annotations

from dataclasses import dataclass

from levserve.engine.stream import TokenStream
from levserve.schedule.request import FinishReason, GenerationRequest


@dataclass(frozen=True, slots=True)
class Submit:
    """One sequence; its batches go to `stream` under the number `index`."""

    request: GenerationRequest
    stream: TokenStream
    index: int
    arrival: float
    model: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants the sequence any more; `finish` is STOP if its reader saw a stop that the device cannot see."""

    request_id: str
    finish: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs until `deadline`, then end the rest."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave: every HTTP thread has gone."""


class DeviceTask:
    """Work for the device thread between two rounds, such as adding a model; the kinds are in `device/tasks.py`."""

    __slots__ = ()

    def refuse(self, error: Exception) -> None:
        """The device thread leaves without doing the task; tells whoever waits for it."""


Message = Submit | Cancel | Drain | DeviceTask | Stop
