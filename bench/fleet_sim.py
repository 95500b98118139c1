"""A discrete-event simulation of levserve replicas behind a router.

A replica works in rounds, as levserve does: one prefill of what waits, up to a budget of tokens, then a decode round of some steps
for all rows that run. Its costs are measured ones (`Costs`). A prompt's cached beginning costs nothing; the cache is a number of
tokens with the least recently used talk dropped first. Everything else of the server is one constant, `host_seconds` a request.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet_traffic import Talk

PAGE = 32
PREFILL_SHARE = 1.5  # as in levserve/schedule/pace.py


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one replica. The defaults are an H200's with a model of 1B parameters; see docs/pages/benchmarks.md."""

    prefill_token_seconds: float = 4e-6
    least_prefill_seconds: float = 0.002
    step_seconds: float = 0.0012
    row_seconds: float = 5e-6
    """What each row adds to a step."""
    round_steps: int = 8
    prefill_tokens: int = 4096
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
    to_prefill: int = 0
    first_token: float = 0.0
    ended: float = 0.0
    tries: int = 1


@dataclass
class Replica:
    place: int
    costs: Costs
    waiting: deque[Request] = field(default_factory=deque)
    prefilling: deque[Request] = field(default_factory=deque)
    num_running: int = 0
    ending: dict[int, list[Request]] = field(default_factory=dict)
    """Those that run, by the round that is their last."""
    num_rounds: int = 0
    is_busy: bool = False
    busy_seconds: float = 0.0
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Tokens by talk, or by system prompt (a negative number), oldest use first."""
    num_cached: int = 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.prefilling) + self.num_running

    def find_cached(self, request: Request) -> int:
        """Tokens of the prompt that need no prefill: whole pages, and never the last token."""
        talk = request.talk
        own = self.cached.get(talk.number, 0)
        shared = min(self.cached.get(-1 - talk.system, 0), talk.system_tokens)
        return min(max(own, shared), request.prompt_tokens - 1) // PAGE * PAGE

    def keep(self, number: int, tokens: int) -> None:
        self.num_cached += tokens - self.cached.pop(number, 0)
        self.cached[number] = tokens
        while self.num_cached > self.costs.cache_tokens and len(self.cached) > 1:
            self.num_cached -= self.cached.popitem(last=False)[1]

    def round(self, now: float) -> tuple[float, list[Request]]:
        """Does one round: when it ends, and who has ended with it."""
        costs, seconds = self.costs, 0.0
        if not self.prefilling and not self.num_running:
            self._admit()
        begun = self._prefill()
        if begun:
            tokens = begun[0]
            seconds += max(tokens * costs.prefill_token_seconds, costs.least_prefill_seconds)
            for request in begun[1]:
                request.first_token = now + seconds + costs.host_seconds
                self.keep(-1 - request.talk.system, request.talk.system_tokens)
                self.keep(request.talk.number, request.prompt_tokens)
                num_rounds = max(1, math.ceil((request.answer_tokens - 1) / costs.round_steps))
                self.ending.setdefault(self.num_rounds + num_rounds, []).append(request)
                self.num_running += 1
        if self.num_running:
            step = costs.step_seconds + costs.row_seconds * self.num_running
            seconds += step * costs.round_steps
            self.num_rounds += 1
        self.busy_seconds += seconds
        self._admit()  # for the next round, which levserve plans when this one begins: who comes later waits for both
        ended = self.ending.pop(self.num_rounds, [])
        self.num_running -= len(ended)
        for request in ended:
            request.ended = now + seconds + costs.host_seconds
        return now + seconds, ended

    def _admit(self) -> None:
        while self.waiting and len(self.prefilling) + self.num_running < self.costs.max_running:
            request = self.waiting.popleft()
            request.cached_tokens = self.find_cached(request)
            request.to_prefill = request.prompt_tokens - request.cached_tokens
            self.prefilling.append(request)

    def _prefill(self) -> tuple[int, list[Request]] | None:
        costs, finished = self.costs, []
        allowed = costs.prefill_tokens
        if self.num_running:
            decoding = (costs.step_seconds + costs.row_seconds * self.num_running) * costs.round_steps
            seconds = min(costs.patience_seconds, PREFILL_SHARE * decoding)
            allowed = max(1, min(allowed, int(seconds / costs.prefill_token_seconds)))
        budget = allowed
        while self.prefilling and budget:
            request = self.prefilling[0]
            count = min(budget, request.to_prefill)
            budget -= count
            request.to_prefill -= count
            if request.to_prefill == 0:
                finished.append(self.prefilling.popleft())
        used = allowed - budget
        return (used, finished) if used else None


Choose = Callable[[Request, float, list[int]], int]
"""A router: the replica for this request at this time, with these loads."""


class Fleet:
    """Runs events in order of time."""

    def __init__(self, replicas: list[Replica], choose: Choose, max_tries: int = 2) -> None:
        self.replicas = replicas
        self.choose = choose
        self.loads = [0] * len(replicas)
        """Requests that each replica has; policies read it."""
        self.now = 0.0
        self.done: list[Request] = []
        self.refused: list[Request] = []
        self._max_tries = max_tries
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.on_end: Callable[[Request], None] = lambda request: None

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def run(self, until: float = float("inf")) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def send(self, request: Request) -> None:
        replica = self.replicas[self.choose(request, self.now, self.loads)]
        if self.loads[replica.place] >= replica.costs.max_running + replica.costs.max_waiting:
            if request.tries < self._max_tries:
                request.tries += 1
                self.send(request)
            else:
                self.refused.append(request)
                self.on_end(request)
            return
        replica.waiting.append(request)
        self.loads[replica.place] += 1
        if not replica.is_busy:
            replica.is_busy = True
            # The request has to be read first.
            self.at(self.now + replica.costs.host_seconds, lambda: self._turn(replica))

    def _turn(self, replica: Replica) -> None:
        ends, ended = replica.round(self.now)
        self.loads[replica.place] -= len(ended)
        for request in ended:
            self.done.append(request)
            self.at(request.ended, lambda request=request: self.on_end(request))  # type: ignore[misc]
        if replica.load:
            self.at(ends, lambda: self._turn(replica))
        else:
            self.at(ends, lambda: self._rest(replica))

    def _rest(self, replica: Replica) -> None:
        if replica.load:
            self._turn(replica)
        else:
            replica.is_busy = False
