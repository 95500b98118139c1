"""Sequences under a constraint, over a fake device that samples without knowing the constraint."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levserve.schedule.budget import Budget
from levserve.schedule.commit import Sampled
from levserve.schedule.constraint import Matcher
from levserve.schedule.pages import PagePool
from levserve.schedule.request import FinishReason, GenerationRequest, Sampling
from levserve.schedule.scheduler import Scheduler
from levserve.schedule.sequence import RoundPlan, Sequence

VOCAB, END, NUM_STATES = 12, 11, 6
TokenSet = frozenset[int]


@dataclass(frozen=True)
class ToyConstraint:
    """In each state some tokens may follow; token t leads from state s to (s + t) % NUM_STATES."""

    allowed: tuple[TokenSet, ...]
    last_state: int | None = None
    """Nothing may follow in this state."""

    def start(self) -> ToyMatcher:
        return ToyMatcher(self)


@dataclass
class ToyMatcher(Matcher):
    rule: ToyConstraint
    state: int = 0
    is_over: bool = False
    is_stuck: bool = False
    is_free: bool = False

    def allows(self, token: int) -> bool:
        return token in self.rule.allowed[self.state]

    def take(self, token: int) -> None:
        assert self.allows(token) and token != END
        self.state = (self.state + token) % NUM_STATES
        self.is_over = self.state == self.rule.last_state

    def ends_with(self, token: int) -> bool:
        return token == END

    def forced(self) -> Seq[int]:
        tokens, state = [], self.state
        while len(self.rule.allowed[state]) == 1 and len(tokens) < 7:
            (token,) = self.rule.allowed[state]
            if token == END:
                break
            tokens.append(token)
            state = (state + token) % NUM_STATES
            if state == self.rule.last_state:
                break
        return tokens

    def mask(self) -> bytes:
        return sum(1 << token for token in self.rule.allowed[self.state]).to_bytes(4, "little")


def draw(seen: Seq[int], seed: int, allowed: Seq[int] = range(VOCAB)) -> int:
    """The token that the device samples after `seen`; restricting `allowed` changes the random draw."""
    return random.Random(repr((tuple(seen), seed, len(allowed) < VOCAB))).choice(sorted(allowed))


def expected(request: GenerationRequest) -> tuple[list[int], FinishReason]:
    """The output token by token: each is drawn freely and, if not allowed, again from those that are."""
    tokens = list(request.prompt)
    assert request.constraint is not None
    matcher = request.constraint.start()
    while len(tokens) < len(request.prompt) + request.max_tokens:
        token = draw(tokens, request.sampling.seed)
        if not matcher.allows(token):
            bits = int.from_bytes(matcher.mask(), "little")
            allowed = [token for token in range(VOCAB) if bits >> token & 1]
            assert token not in allowed
            token = draw(tokens, request.sampling.seed, allowed)
        if token == END:
            return tokens[len(request.prompt) :], FinishReason.STOP
        matcher.take(token)
        tokens.append(token)
        if matcher.is_over:
            return tokens[len(request.prompt) :], FinishReason.STOP
    return tokens[len(request.prompt) :], FinishReason.LENGTH


class Rounds:
    """Runs plans as the device would. The KV of each page slot is the token that was fed there."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.kv: dict[tuple[int, int], int] = {}
        self.last: dict[int, int] = {}
        self.masks: dict[int, tuple[int, int]] = {}

    def run(self, plan: RoundPlan) -> tuple[list[Sampled], list[Sampled]]:
        for sequence in plan.placed:  # the slot may still have its last sequence's mask
            if sequence.slot is not None:
                self.masks.pop(sequence.slot, None)
        for row in plan.rows:
            if row.is_masked:
                self._hold(row.sequence)
                self.last[row.slot] = row.sequence.tokens[-1]
        for chunk in plan.chunks:
            if chunk.is_last and chunk.sequence.needs_mask:
                self._hold(chunk.sequence)
        chunks = []
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.count):
                self._write(chunk.sequence, position, chunk.sequence.tokens[position])
            if chunk.is_last:
                self.last[chunk.slot] = self._draw(chunk.sequence, chunk.start + chunk.count, chunk.slot)
            chunks.append(Sampled([self.last[chunk.slot]] if chunk.is_last else []))
        for fork in plan.forks:
            for offset in range(self.page_size):
                self.kv[fork.target_page, offset] = self.kv.get((fork.source_page, offset), -1)
            self.last[fork.slot] = fork.sequence.tokens[-1]
        rows = []
        for row in plan.rows:
            tokens = []
            for step in range(row.steps):
                self._write(row.sequence, row.position + step, self.last[row.slot])
                self.last[row.slot] = self._draw(row.sequence, row.position + step + 1, row.slot)
                tokens.append(self.last[row.slot])
            rows.append(Sampled(tokens))
        return chunks, rows

    def _hold(self, sequence: Sequence) -> None:
        assert sequence.matcher is not None and sequence.slot is not None
        bits = int.from_bytes(sequence.matcher.mask(), "little")
        self.masks[sequence.slot] = len(sequence.tokens), bits

    def _write(self, sequence: Sequence, position: int, token: int) -> None:
        self.kv[sequence.pages[position // self.page_size], position % self.page_size] = token

    def _draw(self, sequence: Sequence, length: int, slot: int) -> int:
        places = (divmod(position, self.page_size) for position in range(length))
        seen = [self.kv[sequence.pages[page], offset] for page, offset in places]
        seed = sequence.request.sampling.seed
        token = draw(seen, seed)
        position, bits = self.masks.get(slot, (0, 0))
        if sequence.matcher is None or position != length or bits >> token & 1:
            return token
        assert seen == sequence.tokens, "a mask follows tokens that are known"
        return draw(seen, seed, [token for token in range(VOCAB) if bits >> token & 1])


@dataclass
class Server:
    """Plans one round ahead, or reads first where the scheduler asks for it, as the model loop does."""

    scheduler: Scheduler
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, list[FinishReason]] = field(default_factory=dict)
    in_flight: tuple[RoundPlan, list[Sampled], list[Sampled]] | None = None
    num_rounds: int = 0

    def __post_init__(self) -> None:
        self.rounds = Rounds(self.scheduler.pool.page_size)

    def submit(self, request: GenerationRequest) -> None:
        self.outputs[request.request_id], self.finishes[request.request_id] = [], []
        self.scheduler.add(request)

    def step(self) -> None:
        before, self.in_flight = self.in_flight, None
        if before is not None and self.scheduler.reads_first:
            self._commit(before)
            before = None
        plan = self.scheduler.plan()
        self.scheduler.check()
        if not plan.is_empty:
            self.in_flight = (plan, *self.rounds.run(plan))
            self.num_rounds += 1
        if before is not None:
            self._commit(before)
        self.scheduler.check()

    def run(self) -> None:
        while self.scheduler.has_work or self.in_flight is not None:
            self.step()
            assert self.num_rounds < 5000

    def _commit(self, done: tuple[RoundPlan, list[Sampled], list[Sampled]]) -> None:
        for update in self.scheduler.commit(*done):
            name = update.sequence.request.request_id
            self.outputs[name] += update.batch.tokens
            if update.finish is not None:
                self.finishes[name].append(update.finish)


def make_server(*, pages: int = 64, page_size: int = 4, slots: int = 4, steps: int = 1) -> Server:
    chunk_costs = {4: 4, 16: 16}
    budget = Budget(slots, steps, tuple(chunk_costs), busy_tokens=16, idle_tokens=16)
    return Server(Scheduler(PagePool(pages, page_size), budget))


sets = st.frozensets(st.integers(1, END), min_size=1, max_size=4)
forced_tokens = st.integers(1, END - 1).map(lambda token: frozenset((token,)))
rules = st.builds(
    ToyConstraint,
    st.tuples(*[sets | forced_tokens] * NUM_STATES),
    st.none() | st.integers(0, NUM_STATES - 1),
)
requests = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple),
    st.integers(1, 24),
    st.none() | rules,
    st.integers(0, 3),
    st.sampled_from((Sampling(), Sampling(num_logprobs=0), Sampling(presence_penalty=1.0))),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(14, 40),
    st.integers(1, 4),
)
def test_the_text_is_the_same_in_any_company_with_any_rounds_and_after_preemption(
    wanted: list[tuple[tuple[int, ...], int, ToyConstraint | None, int, Sampling]],
    steps: int,
    pages: int,
    slots: int,
) -> None:
    server = make_server(pages=pages, slots=slots, steps=steps)
    constrained = []
    for number, (prompt, max_tokens, rule, seed, sampling) in enumerate(wanted):
        drawn = Sampling(
            seed=seed, num_logprobs=sampling.num_logprobs, presence_penalty=sampling.presence_penalty
        )
        request = GenerationRequest(f"r{number}", prompt, max_tokens, drawn, constraint=rule)
        server.submit(request)
        if rule is not None:
            constrained.append(request)
    server.run()
    for request in constrained:
        tokens, finish = expected(request)
        assert server.outputs[request.request_id] == tokens
        assert server.finishes[request.request_id] == [finish]
    assert server.scheduler.pool.num_held == 0


@pytest.mark.parametrize(
    ("steps", "company", "is_jumped"),
    [
        (1, "", True),
        (1, "free", False),
        (1, "held", False),
        (8, "", True),
        (8, "free", False),
        (8, "held", True),
    ],
)
def test_forced_tokens_are_prefilled_only_where_others_may_wait_for_that(
    steps: int, company: str, is_jumped: bool
) -> None:
    server = make_server(steps=steps)
    rule = ToyConstraint(tuple(frozenset((token + 1,)) for token in range(NUM_STATES)), None)
    held = GenerationRequest("held", (3, 4), 12, Sampling(seed=1), constraint=rule)
    server.submit(held)
    if company:
        # A sequence that runs alone prefills its forced tokens, so both must end together, or the free last.
        its_rule, max_tokens = (rule, 12) if company == "held" else (None, 160)
        server.submit(GenerationRequest("other", (5, 6), max_tokens, Sampling(seed=2), constraint=its_rule))
    server.run()
    _, num_forced = server.scheduler.take_constraint_counts()
    assert bool(num_forced) is is_jumped
    assert server.outputs["held"] == expected(held)[0]
