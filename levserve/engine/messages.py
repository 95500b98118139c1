"""The messages that other threads send to the device thread: frozen records through one queue."""

from __future__ import annotations

from dataclasses import dataclass

from levserve.engine.stream import TokenStream
from levserve.schedule.request import FinishReason, GenerationRequest


@dataclass(frozen=True, slots=True)
class Submit:
    """Runs one sequence; its batches go to `stream` under the number `index`."""

    request: GenerationRequest
    stream: TokenStream
    index: int
    arrival: float
    model: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a sequence; `finish` is STOP if its reader found a stop string, which the device cannot see."""

    request_id: str
    finish: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class Drain:
    """Takes no new sequences, and ends those that still run at `deadline` on the monotonic clock."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the device thread; sent when every HTTP thread has ended."""


class DeviceTask:
    """Work for the device thread between two rounds, such as adding a model; see `device/tasks.py`."""

    __slots__ = ()

    def refuse(self, error: Exception) -> None:
        """Called if the device thread ends before it runs the task: gives the error to the waiting thread."""


Message = Submit | Cancel | Drain | DeviceTask | Stop
