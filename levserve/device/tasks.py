"""Tasks for the device thread that concern models: serve one more, stop serving one, swap weights."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from levserve.device.kind import Planner, RoundRunner
from levserve.engine.messages import DeviceTask
from levserve.model.placement import HostArray
from levserve.schedule.pace import Pace


@dataclass(frozen=True, slots=True)
class Attach(DeviceTask):
    """Serves this model too, from the next round on."""

    model: str
    scheduler: Planner
    runner: RoundRunner
    pace: Pace


@dataclass(frozen=True, slots=True)
class Detach(DeviceTask):
    """Stops serving this model; `done` gets its runner, which is then not in use."""

    model: str
    done: Future[RoundRunner]

    def refuse(self, error: Exception) -> None:
        self.done.set_exception(error)


@dataclass(frozen=True, slots=True)
class SwapWeights(DeviceTask):
    """Serves with these weights from the next round on; `done` gets the seconds that the swap took."""

    model: str
    leaves: Sequence[HostArray]
    """On the host."""
    done: Future[float]

    def refuse(self, error: Exception) -> None:
        self.done.set_exception(error)
