"""One simulated levserve: which chunks and rows it puts into each round, and when the round ends.

The decisions are those of `levserve/schedule/scheduler.py` with the budget of an accelerator, and the
pace is levserve's own. A round is planned while the one before runs: what arrives meanwhile waits for
the round after, a prompt's stream decodes from the round after its last chunk on, and a slot is free
once its last round is read. `tests/pure/test_fleet.py` compares with the scheduler itself.

Simplified: the pool of pages is a number of tokens, the least recently used talk is dropped first, and
there is no preemption.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from fleet_traffic import Talk

from levserve.schedule.pace import Pace
from levserve.schedule.scheduler import DEEP_TOKENS

PAGE = 32


@dataclass(frozen=True, slots=True)
class Costs:
    """What one replica takes. Defaults: an H200 and a model of 1B parameters; see
    docs/pages/benchmarks.md."""

    prefill_token_seconds: float = 4e-6
    least_prefill_seconds: float = 0.002
    step_seconds: float = 0.0012
    row_seconds: float = 5e-6
    """What each row adds to a step."""
    round_steps: int = 8
    prefill_tokens: int = 4096
    """At most, in a round without streams."""
    chunk_tokens: int = 64
    """Chunks count as multiples of this; beside streams a round prefills two of them or more."""
    patience_seconds: float = 0.1
    """--inter-token-goal-ms: how long prompts may hold up a round with running streams."""
    max_running: int = 64
    max_waiting: int = 256
    cache_tokens: int = 400_000
    host_seconds: float = 0.003


@dataclass(slots=True)
class Request:
    talk: Talk
    prompt_tokens: int
    answer_tokens: int
    sent: float
    cached_tokens: int = 0
    num_computed: int = 0
    first_token: float = 0.0
    ended: float = 0.0
    tries: int = 1


@dataclass(slots=True)
class Round:
    """What a replica computes in one pass: chunks of prompts, then some steps for every row."""

    num_prefill: int
    priming: list[Request]
    """Requests whose prompts the round finishes."""
    num_rows: int
    ending: list[Request]
    """Requests that get their last token in it."""
    ends: float = 0.0


@dataclass
class Replica:
    place: int
    costs: Costs
    waiting: deque[Request] = field(default_factory=deque)
    busy_seconds: float = 0.0
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Tokens by talk, or by system prompt (a negative number), oldest use first."""
    num_cached: int = 0

    def __post_init__(self) -> None:
        self._pace = Pace(self.costs.prefill_token_seconds, self.costs.patience_seconds)
        self._prefilling: deque[Request] = deque()
        self._num_seated = 0
        self._num_decoding = 0
        self._num_rounds = 0
        self._endings: dict[int, list[Request]] = {}
        """Requests that decode, by the number of their last round."""
        self._running: Round | None = None
        self._next: Round | None = None

    @property
    def is_idle(self) -> bool:
        return self._running is None

    def turn(self, now: float) -> Round | None:
        """Reads the round that has just ended, begins the next and plans the one after; None if there is nothing to do."""
        if self._running is not None:
            self._read(self._running)
        self._running = self._next or self._plan()
        if self._running is None:
            return None
        self._begin(self._running, now)
        self._next = self._plan()
        return self._running

    def find_cached(self, request: Request) -> int:
        """Tokens of the prompt that need no prefill: whole pages, and never the last token."""
        talk = request.talk
        own = self.cached.get(talk.number, 0)
        shared = min(self.cached.get(-1 - talk.system, 0), talk.system_tokens)
        return min(max(own, shared), request.prompt_tokens - 1) // PAGE * PAGE

    def keep(self, number: int, tokens: int) -> None:
        known = self.cached.pop(number, 0)
        self.cached[number] = max(tokens, known)
        self.num_cached += max(tokens - known, 0)
        while self.num_cached > self.costs.cache_tokens and len(self.cached) > 1:
            self.num_cached -= self.cached.popitem(last=False)[1]

    def _begin(self, begun: Round, now: float) -> None:
        costs, prefill_seconds = self.costs, 0.0
        if begun.num_prefill:
            by_tokens = begun.num_prefill * costs.prefill_token_seconds
            prefill_seconds = max(by_tokens, costs.least_prefill_seconds)
        begun.ends = now + prefill_seconds + self._decode_seconds(begun.num_rows)
        for request in begun.priming:
            request.first_token = now + prefill_seconds + costs.host_seconds
        for request in begun.ending:
            has_one = request.answer_tokens == 1
            request.ended = request.first_token if has_one else begun.ends + costs.host_seconds
        self.busy_seconds += begun.ends - now

    def _read(self, ended: Round) -> None:
        self._num_seated -= len(ended.ending)
        for request in ended.ending:
            if request.talk.repeats_answers:
                self.keep(request.talk.number, request.prompt_tokens + request.answer_tokens - 1)
        if ended.num_rows:
            self._pace.note_decoding(ended.num_rows, self._decode_seconds(ended.num_rows))

    def _decode_seconds(self, num_rows: int) -> float:
        if not num_rows:
            return 0.0
        return (self.costs.step_seconds + self.costs.row_seconds * num_rows) * self.costs.round_steps

    def _plan(self) -> Round | None:
        num_rows = self._num_decoding
        num_prefill, priming = self._plan_chunks(self._busy_tokens() if num_rows else None)
        if not num_rows and not num_prefill:
            return None
        self._num_rounds += 1
        ending = self._endings.pop(self._num_rounds, [])
        self._num_decoding -= len(ending)
        for request in priming:
            num_rounds = math.ceil((request.answer_tokens - 1) / self.costs.round_steps)
            if num_rounds == 0:
                ending.append(request)
                continue
            self._endings.setdefault(self._num_rounds + num_rounds, []).append(request)
            self._num_decoding += 1
        return Round(num_prefill, priming, num_rows, ending)

    def _busy_tokens(self) -> int:
        """Tokens that a round may prefill beside its streams."""
        num_streams = min(self._num_seated + len(self.waiting), self.costs.max_running)
        return self._pace.max_prefill(self.costs.prefill_token_seconds, num_streams)

    def _plan_chunks(self, busy_tokens: int | None) -> tuple[int, list[Request]]:
        """Tokens of prompts that a round computes, and the requests whose prompts it finishes."""
        size, num_prefill, priming = self.costs.chunk_tokens, 0, []
        is_deep = bool(self._prefilling) and self._prefilling[0].num_computed >= DEEP_TOKENS
        allowed = self.costs.prefill_tokens if busy_tokens is None else busy_tokens
        left = max(allowed, size if is_deep else 2 * size)
        while left >= size:
            if not self._prefilling and not self._place_next():
                break
            request = self._prefilling[0]
            limit = min(left, self.costs.prefill_tokens) // size * size
            count = min(request.prompt_tokens - request.num_computed, limit)
            request.num_computed += count
            num_prefill += count
            left -= math.ceil(count / size) * size
            self.keep(-1 - request.talk.system, min(request.num_computed, request.talk.system_tokens))
            self.keep(request.talk.number, request.num_computed)
            if request.num_computed == request.prompt_tokens:
                priming.append(self._prefilling.popleft())
        return num_prefill, priming

    def _place_next(self) -> bool:
        """Gives the next request a slot, if a request waits and a slot is free."""
        if not self.waiting or self._num_seated == self.costs.max_running:
            return False
        request = self.waiting.popleft()
        request.cached_tokens = request.num_computed = self.find_cached(request)
        self._num_seated += 1
        self._prefilling.append(request)
        return True
