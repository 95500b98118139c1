"""The fifth step of a start: the runner with its compiled programs, and the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from levserve.device.executor import Executor
from levserve.device.kind import Planner, RoundRunner
from levserve.device.memory_error import check_address_space, explained
from levserve.device.platform import free_bytes
from levserve.device.tasks import Attach
from levserve.engine.served_model import ServedModel
from levserve.models.group import Group
from levserve.models.kind import AnyKind, ModelSizes
from levserve.models.read import Contents
from levserve.observe.metrics import Metrics
from levserve.schedule.pace import Pace


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything the device loop needs, ready to run."""

    description: AnyKind
    model: ServedModel
    sizes: ModelSizes
    runner: RoundRunner
    scheduler: Planner
    pace: Pace
    group: Group | None = None

    def attach(self) -> Attach:
        """The message that makes the device thread serve it."""
        return Attach(self.model.name, self.scheduler, self.runner, self.pace)


def build(
    description: AnyKind,
    contents: Contents,
    sizes: ModelSizes,
    metrics: Metrics,
    report: Callable[[str], None],
    group: Group | None = None,
) -> Loaded:
    """Allocates the state on the device and compiles the first programs; slow."""
    settings = description.settings
    asked, advice = description.explain_memory(sizes)
    with explained(asked, advice, lambda: free_bytes(*description.devices)):
        if description.devices[0].platform == "cpu":
            check_address_space()
        runner = description.make_runner(contents.arrays, sizes, metrics)
        try:
            runner.compile_first(report)
            if group is not None:
                assert isinstance(runner, Executor)
                group.lead(runner)
            runner.warm_up(report)
        except BaseException:
            runner.free()
            raise
    name, *aliases = settings.served_model_name or (description.files.name,)
    model = ServedModel(
        name=name,
        tokenizer=contents.tokenizer,
        grammars=contents.grammars,
        tools=contents.tools,
        reasoning=contents.reasoning,
        max_seq_len=sizes.max_seq_len,
        hidden_size=description.hidden_size,
        num_rows=description.vocab_size,
        has_whole_texts=description.has_whole_texts,
        created=int(time.time()),
        aliases=tuple(aliases),
        root=description.files.name,
    )
    pace = Pace(runner.prefill_token_seconds, settings.inter_token_goal_ms / 1000)
    return Loaded(description, model, sizes, runner, description.make_planner(sizes, runner), pace, group)
