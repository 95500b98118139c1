"""The fifth step of a start: the runner with its compiled programs, and the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from levserve.device.platform import explained
from levserve.device.runner import Runner
from levserve.device.sizing import Sizes, human
from levserve.device.tasks import Attach
from levserve.engine.served_model import ServedModel
from levserve.models.describe import Description
from levserve.models.read import Contents
from levserve.observe.metrics import Metrics
from levserve.schedule.budget import Budget
from levserve.schedule.pace import Pace
from levserve.schedule.pages import PagePool
from levserve.schedule.scheduler import Scheduler
from levserve.schedule.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything the device loop needs, ready to run."""

    description: Description
    model: ServedModel
    sizes: Sizes
    runner: Runner
    scheduler: Scheduler
    pace: Pace

    def attach(self) -> Attach:
        """The message that makes the device thread serve it."""
        return Attach(self.model.name, self.scheduler, self.runner, self.pace)


def build(
    description: Description,
    contents: Contents,
    sizes: Sizes,
    metrics: Metrics,
    report: Callable[[str], None],
) -> Loaded:
    """Allocates the KV pool and compiles the first programs; slow."""
    settings = description.settings
    asked = f"{human(sizes.kv_bytes)} for {sizes.num_pages} KV pages"
    with explained(asked, description.device, "lower --kv-memory, --kv-pages or --max-running"):
        decoder = description.make_decoder(contents.arrays, sizes.max_seq_len)
        runner = Runner(decoder, sizes, description.storage, metrics)
        try:
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
        hidden_size=description.config.hidden_size,
        created=int(time.time()),
        aliases=tuple(aliases),
        root=description.files.name,
    )
    pace = Pace(runner.prefill_token_seconds, settings.inter_token_goal_ms / 1000)
    return Loaded(description, model, sizes, runner, _make_scheduler(description, sizes), pace)


def _make_scheduler(description: Description, sizes: Sizes) -> Scheduler:
    traits = description.backend.traits
    budget = Budget(
        sizes.rows,
        sizes.round_steps,
        sizes.chunk_costs,
        busy_tokens=sizes.num_tokens,
        idle_tokens=sizes.chunk_sizes[-1],
        chunk_overhead=0 if sizes.mixed_tokens else traits.chunk_overhead,
        double_at=traits.double_at,
    )
    speculation = Speculation(sizes.num_draft) if sizes.num_draft else None
    return Scheduler(PagePool(sizes.num_pages, sizes.page_size), budget, speculation)
