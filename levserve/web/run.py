"""A request that the engine is running: its choices and their deltas, collected here or streamed by `sse.py`.

Belongs to one HTTP thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from levserve.answers.answer import Timings, Usage, count_usage
from levserve.answers.logprobs import PromptLogprobs
from levserve.answers.whole import AnswerKind, join_answered, make_answer, show_prompts
from levserve.engine.served_model import ServedModel
from levserve.generation import Choice, Delta, Deltas
from levserve.request.schema import GenerationBody
from levserve.web.request_log import RequestLog


class Totals(NamedTuple):
    usage: Usage
    timings: Timings | UnsetType


@dataclass(frozen=True, slots=True)
class Run:
    """The choices are in prompt-major order; the answer has the likeliest `num_choices` of each prompt."""

    body: GenerationBody
    model: ServedModel
    prompts: list[list[int]]
    choices: list[Choice]
    deltas: Deltas
    request_log: RequestLog
    model_name: str = ""
    """Which of the model's names the client used; empty for the main one."""
    warnings: Sequence[str] = ()
    """Where the server did not do what the client asked."""

    def make_answer(self, kind: type[AnswerKind]) -> AnswerKind:
        return make_answer(kind, self.body, self.model, self.model_name, self.prompts, self.warnings)

    def collect(self) -> list[Delta]:
        """Waits for the end; one joined delta per choice of the answer, the likeliest first if more ran."""
        gathered: list[list[Delta]] = [[] for _ in self.choices]

        def keep(index: int, delta: Delta) -> None:
            gathered[index].append(delta)

        self.each_delta(keep)
        return join_answered(self.body, self.choices, gathered)

    def each_delta(self, take: Callable[[int, Delta], None]) -> None:
        """Calls `take` with every delta until the end: on one thread at a time, but not always this one."""

        def on_delta(index: int, delta: Delta) -> bool:
            take(index, delta)
            return True

        while self.deltas.wait(None, on_delta) and (found := next(self.deltas, None)) is not None:
            take(*found)

    def usage(self) -> Usage:
        return count_usage(self.prompts, self.choices)

    def timings(self) -> Timings | UnsetType:
        """Where the time went so far, if the client asked."""
        return self.request_log.timings() if self.body.timings else UNSET

    def totals(self) -> Totals | None:
        """What stands at the end of a stream, if the client asked for any of it."""
        is_asked = self.body.wants_usage or self.body.timings
        return Totals(self.usage(), self.timings()) if is_asked else None

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """Each prompt's scores, from its first choice; empty if the client did not ask for them."""
        return show_prompts(self.body, self.prompts, self.choices, self.model.tokenizer)
