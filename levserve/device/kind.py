"""What a kind of model must offer the engine: a planner that decides, and a runner that computes.

`ModelLoop` serves any model through these. There are two kinds. Decoders keep the keys and values of their
tokens in pages (`Scheduler`, `Runner`). Models without a cache compute a whole text for every token
(`WholeTextScheduler`, `TextRunner`); what they compute is behind `text_rounds.TextModel`. Everything after
the logits is common to both: `sampling.py`, the committing of tokens, delivery and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from levserve.model.placement import HostArray
from levserve.schedule.commit import Sampled
from levserve.schedule.pace import Backlog
from levserve.schedule.pages import PagePool
from levserve.schedule.request import FinishReason, GenerationRequest
from levserve.schedule.sequence import RoundPlan, SequenceUpdate
from levserve.schedule.sequence import Sequence as Running
from levserve.schedule.speculation import Speculation


class Planner(Protocol):
    """Accepts requests, plans rounds, and commits what they computed; works on plain numbers, not arrays."""

    speculation: Speculation | None

    @property
    def pool(self) -> PagePool | None:
        """The pages of a model with a KV cache; None for other models."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_streams(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def has_live_work(self) -> bool:
        """Whether any of its work is not background work."""

    @property
    def is_speculating(self) -> bool: ...

    @property
    def reads_first(self) -> bool:
        """Whether the round in flight must be read before the next one is planned."""

    def backlog(self) -> Backlog: ...

    def add(self, request: GenerationRequest) -> Running: ...

    def end(self, request_id: str, finish: FinishReason) -> SequenceUpdate | None: ...

    def end_all(self, finish: FinishReason) -> list[SequenceUpdate]: ...

    def expire(self, now: float) -> list[SequenceUpdate]: ...

    def plan(self, max_prefill: int | None = None) -> RoundPlan: ...

    def commit(
        self, plan: RoundPlan, chunks: Sequence[Sampled], rows: Sequence[Sampled]
    ) -> list[SequenceUpdate]: ...

    def commit_chunks(self, plan: RoundPlan, chunks: Sequence[Sampled]) -> list[SequenceUpdate]: ...

    def commit_rows(self, plan: RoundPlan, rows: Sequence[Sampled]) -> list[SequenceUpdate]: ...

    def note_round(self, plan: RoundPlan, seconds: float) -> None:
        """Notes how long a round took, once it was read."""

    def take_constraint_counts(self) -> tuple[int, int]: ...

    def forget_prefixes(self) -> None:
        """Called when the weights have changed."""


class Round(Protocol):
    """A dispatched plan; reading waits for the device."""

    @property
    def plan(self) -> RoundPlan: ...

    @property
    def is_mixed(self) -> bool: ...

    def read(self) -> tuple[list[Sampled], list[Sampled]]: ...

    def read_chunks(self) -> list[Sampled]: ...

    def read_rows(self) -> list[Sampled]: ...


class CompiledPrograms(Protocol):
    """The programs of a runner; all that the device loop needs to know of them."""

    @property
    def max_verified(self) -> int: ...

    @property
    def has_cold(self) -> bool: ...

    @property
    def is_complete(self) -> bool: ...

    def start_background(self) -> None: ...

    def stop(self, *, waits: bool = True) -> None: ...


class RoundRunner(Protocol):
    """Owns a model's weights and its state on the device."""

    prefill_token_seconds: float

    @property
    def programs(self) -> CompiledPrograms: ...

    def compile_first(self, report: Callable[[str], None]) -> None:
        """Compiles what is needed to serve everything, if slowly."""

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Runs the first programs, and times them."""

    def warm_one(self) -> None: ...

    def dispatch(self, plan: RoundPlan, *, may_mix: bool = False) -> Round: ...

    def swap(self, leaves: Sequence[HostArray]) -> None: ...

    def free(self) -> None: ...
