"""What the life of models asks of the device thread: serve one more, serve one no more, swap weights."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax

from levserve.device.runner import Runner
from levserve.engine.messages import DeviceTask
from levserve.schedule.pace import Pace
from levserve.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Attach(DeviceTask):
    """Serve this model too, from the next round on."""

    model: str
    scheduler: Scheduler
    runner: Runner
    pace: Pace


@dataclass(frozen=True, slots=True)
class Detach(DeviceTask):
    """Stop serving this model; `done` gets its runner, which nothing uses any longer."""

    model: str
    done: Future[Runner]

    def refuse(self, error: Exception) -> None:
        self.done.set_exception(error)


@dataclass(frozen=True, slots=True)
class SwapWeights(DeviceTask):
    """Serve with these weights, leaves on the host, from the next round on; `done` gets the seconds it took."""

    model: str
    leaves: Sequence[jax.Array]
    done: Future[float]

    def refuse(self, error: Exception) -> None:
        self.done.set_exception(error)
