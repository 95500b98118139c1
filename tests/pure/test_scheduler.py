"""The scheduler over a device whose tokens can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levserve.schedule.budget import Budget
from levserve.schedule.commit import Sampled
from levserve.schedule.pages import PagePool
from levserve.schedule.request import FinishReason, GenerationRequest, TokenLogprob
from levserve.schedule.scheduler import DEEP_TOKENS, Scheduler
from levserve.schedule.sequence import RoundPlan, Row, Sequence, SequenceUpdate
from levserve.schedule.speculation import Speculation

STOP = 7


def next_token(tokens: list[int]) -> int:
    """The fake device's sample after `tokens`: a repeating walk through 0..12 that shifts every 12 tokens."""
    return (tokens[-1] * 5 + len(tokens) // 12) % 13


def expected_output(prompt: tuple[int, ...], max_tokens: int, stop: bool) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        token = next_token(tokens)
        if stop and token == STOP:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class FakeRounds:
    """Runs plans as the device would: the KV of each page slot is the token that was fed there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.page_size = scheduler.pool.page_size
        self.speculation = scheduler.speculation
        self.kv: dict[tuple[int, int], int] = {}
        self.draft_kv: dict[tuple[int, int], int] = {}
        self.last: dict[int, int] = {}

    def run(self, plan: RoundPlan) -> tuple[list[Sampled], list[Sampled]]:
        chunks = []
        for chunk in plan.chunks:
            sequence, pages = chunk.sequence, chunk.sequence.pages
            for position in range(chunk.start, chunk.start + chunk.count):
                self._write(pages, position, sequence.tokens[position])
                self._show_draft_model(pages, position, sequence.tokens[position])
            scores = [TokenLogprob(-float(position)) for position in chunk.scored]
            if chunk.is_last:
                self.last[chunk.slot] = self._sample(sequence, chunk.start + chunk.count)
            chunks.append(Sampled([self.last[chunk.slot]] if chunk.is_last else [], prompt_logprobs=scores))
        for fork in plan.forks:
            for offset in range(self.page_size):
                for kv in (self.kv, self.draft_kv):
                    kv[fork.target_page, offset] = kv.get((fork.source_page, offset), -1)
            self.last[fork.slot] = fork.sequence.tokens[-1]
        rows = []
        for row in plan.rows:
            assert not row.draft or row.position == len(row.sequence.tokens) - 1, (
                "a draft follows tokens that are known"
            )
            if row.reach:
                rows.append(self._run_drafted(row))
                continue
            tokens: list[int] = []
            for offset, token in enumerate(row.draft, start=1):
                self._write(row.sequence.pages, row.position + offset, token)
            for step in range(row.steps + len(row.draft)):
                if row.draft and tokens != [*row.draft[:step]]:
                    break
                self._write(row.sequence.pages, row.position + step, self.last[row.slot])
                self.last[row.slot] = self._sample(row.sequence, row.position + step + 1)
                tokens.append(self.last[row.slot])
            rows.append(Sampled(tokens))
        return chunks, rows

    def _run_drafted(self, row: Row) -> Sampled:
        """Runs the turns of a draft model that is wrong at every fifth position."""
        assert self.speculation is not None and row.position == len(row.sequence.tokens) - 1
        sequence, tokens = row.sequence, list(row.sequence.tokens)
        num_drafted = 0
        for position in row.missed:
            self._show_draft_model(sequence.pages, position, tokens[position])
        for _ in range(self.speculation.num_turns):
            newest = len(tokens) - 1
            num_fed = min(self.speculation.num_draft, row.position + row.reach - len(tokens))
            if num_fed < 0:
                break
            for position in (newest - 1, newest):
                self._show_draft_model(sequence.pages, position, tokens[position])
            places = (divmod(position, self.page_size) for position in range(len(tokens)))
            assert [self.draft_kv[sequence.pages[page], offset] for page, offset in places] == tokens
            draft: list[int] = []
            for position in range(len(tokens), len(tokens) + num_fed):
                draft.append((next_token(tokens + draft) + (position % 5 == 0)) % 13)
                self._write(sequence.pages, position, draft[-1])
            for index, token in enumerate(draft[:-1]):
                self._show_draft_model(sequence.pages, newest + 1 + index, token)
            for expected in (*draft, None):
                self._write(sequence.pages, len(tokens) - 1, tokens[-1])
                tokens.append(self._sample(sequence, len(tokens)))
                if tokens[-1] != expected:
                    break
            num_drafted += num_fed
        self.last[row.slot] = tokens[-1]
        return Sampled(tokens[row.position + 1 :], num_drafted=num_drafted)

    def _show_draft_model(self, pages: list[int], position: int, token: int) -> None:
        self.draft_kv[pages[position // self.page_size], position % self.page_size] = token

    def _write(self, pages: list[int], position: int, token: int) -> None:
        self.kv[pages[position // self.page_size], position % self.page_size] = token

    def _sample(self, sequence: Sequence, length: int) -> int:
        """Attends to all before it; a page given to two sequences or a wrong draft in a shared one shows."""
        places = (divmod(position, self.page_size) for position in range(length))
        seen = [self.kv[sequence.pages[page], offset] for page, offset in places]
        prompt = sequence.request.prompt
        assert seen == [*prompt, *expected_output(prompt, length - len(prompt), stop=False)]
        return next_token(seen)


@dataclass
class Server:
    """Plans one round ahead, as the model loop does, or reads first, as that does with drafts."""

    scheduler: Scheduler
    reads_first: bool = False
    outputs: dict[str, list[int]] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)
    finishes: dict[str, list[FinishReason]] = field(default_factory=dict)
    num_preempted: int = 0
    in_flight: tuple[RoundPlan, list[Sampled], list[Sampled]] | None = None

    def __post_init__(self) -> None:
        self.rounds = FakeRounds(self.scheduler)

    def submit(self, request: GenerationRequest) -> None:
        assert self.scheduler.fits(request)
        name = request.request_id
        self.outputs[name], self.scores[name], self.finishes[name] = [], [], []
        self.scheduler.add(request)

    def step(self) -> RoundPlan:
        before, self.in_flight = self.in_flight, None
        if self.reads_first and before is not None:
            self.deliver(self.scheduler.commit(*before))
            before = None
        plan = self.scheduler.plan()
        self.num_preempted += len(plan.preempted)
        self.scheduler.check()
        if not plan.is_empty:
            self.in_flight = (plan, *self.rounds.run(plan))
        if before is not None:
            self.deliver(self.scheduler.commit(*before))
        self.scheduler.check()
        return plan

    def run_dry(self, limit: int = 5_000) -> None:
        for number in range(limit):
            if not self.scheduler.has_work and self.in_flight is None:
                return
            self.reads_first ^= number % 7 == 6
            self.step()
        raise AssertionError("somebody starves")

    def deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            name = update.sequence.request.request_id
            assert not self.finishes[name], "updates after the end"
            self.outputs[name] += update.batch.tokens
            self.scores[name] += [entry.logprob for entry in update.batch.prompt_logprobs]
            if update.finish is not None:
                self.finishes[name].append(update.finish)


def make(
    num_pages: int = 32,
    page_size: int = 4,
    num_slots: int = 4,
    steps: int = 1,
    speculation: Speculation | None = None,
    **budget: int,
) -> Server:
    limits = {"busy_tokens": 4, "idle_tokens": 16} | budget
    return Server(
        Scheduler(PagePool(num_pages, page_size), Budget(num_slots, steps, (2, 4, 8), **limits), speculation)
    )


def eager(num_draft: int, max_rows: int = 8, num_turns: int = 0) -> Speculation:
    """Speculation that drafts as long as it gains, because the cost of checking is never reported."""
    speculation = Speculation(num_draft, num_turns)
    speculation.max_rows = max_rows
    for num_rows in range(1, max_rows + 1):
        speculation.note_round(num_rows, 1.0, is_verify=False)
    return speculation


def ask(
    name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 5, **more: object
) -> GenerationRequest:
    return GenerationRequest(name, prompt, max_tokens, **more)  # type: ignore[arg-type]


def test_a_request_gets_the_tokens_the_device_samples() -> None:
    server = make()
    server.submit(ask("a"))
    server.run_dry()
    assert server.outputs["a"] == expected_output((1, 2, 3), 5, stop=False)
    assert server.finishes["a"] == [FinishReason.LENGTH]


def test_a_stop_token_ends_the_request_and_is_not_delivered() -> None:
    server = make(steps=4)
    server.submit(ask("a", (2, 2), 40, stop_ids=frozenset({STOP})))
    server.run_dry()
    assert server.outputs["a"] == expected_output((2, 2), 40, stop=True)
    assert server.finishes["a"] == [FinishReason.STOP]
    assert STOP not in server.outputs["a"]


def test_sequences_decode_together_and_join_while_others_run() -> None:
    server = make()
    server.submit(ask("a", max_tokens=12))
    server.step()
    server.step()
    server.submit(ask("b", max_tokens=3))
    widths = [len(server.step().rows) for _ in range(4)]
    assert max(widths) == 2


def test_a_long_prompt_does_not_stop_running_rows() -> None:
    server = make()
    server.submit(ask("short", max_tokens=20))
    server.step()
    server.submit(ask("long", tuple(range(40)), 1))
    plans = [server.step() for _ in range(6)]
    assert all(len(plan.rows) == 1 for plan in plans)
    assert all(sum(chunk.count for chunk in plan.chunks) <= 4 for plan in plans)


def test_where_there_is_time_for_little_a_prompt_moves_by_less_the_deeper_it_is() -> None:
    server = make(num_pages=256, busy_tokens=1)
    server.submit(ask("a", max_tokens=300))
    server.step()
    server.submit(ask("b", tuple(range(2, 302)), 1))
    chunks = [chunk for _ in range(100) for chunk in server.step().chunks]
    assert {chunk.count for chunk in chunks if chunk.start < DEEP_TOKENS} == {4}
    assert {chunk.count for chunk in chunks if chunk.start >= DEEP_TOKENS} == {2}
    assert sum(chunk.count for chunk in chunks) == 300


def test_beside_streams_a_deep_token_counts_for_more_and_alone_it_does_not() -> None:
    server = make(num_pages=256, busy_tokens=8, idle_tokens=8, double_at=16)
    server.submit(ask("alone", tuple(range(2, 66)), 1))
    assert [server.step().chunks[0].count for _ in range(8)] == [8] * 8
    server.submit(ask("stream", max_tokens=100))
    server.step()
    server.submit(ask("beside", tuple(range(100, 164)), 1))
    server.submit(ask("after", (7, 8), 1))
    chunks = [[(chunk.start, chunk.count) for chunk in server.step().chunks] for _ in range(27)]
    assert chunks[:4] == [[(0, 8)], [(8, 4)], [(12, 4)], [(16, 4)]], "at 16 a token counts as two"
    assert chunks[-4:] == [[(58, 2)], [(60, 2)], [(62, 2)], [(0, 2)]], (
        "each round does something, and too little is left for a second"
    )


@pytest.mark.parametrize(("overhead", "counts"), [(0, [4, 3]), (1, [4, 2]), (2, [4])])
def test_a_second_chunk_is_left_for_later_if_to_begin_it_takes_longer_than_its_tokens(
    overhead: int, counts: list[int]
) -> None:
    server = make(busy_tokens=8, chunk_overhead=overhead)
    server.submit(ask("running", max_tokens=20))
    server.step()
    server.submit(ask("a", tuple(range(2, 6)), 1))
    server.submit(ask("b", tuple(range(7, 10)), 1))
    assert [chunk.count for chunk in server.step().chunks] == counts


def test_a_shared_prompt_is_computed_once() -> None:
    server = make()
    prompt = tuple(range(13))
    server.submit(ask("a", prompt, 2))
    server.submit(ask("b", prompt, 2))
    plans = [server.step() for _ in range(12)]
    assert sum(chunk.count for plan in plans for chunk in plan.chunks) == 13 + 1
    assert server.outputs["a"] == server.outputs["b"]


@pytest.mark.parametrize("length", [1, 4, 5, 13])
def test_choices_of_one_prompt_compute_it_once_to_the_last_token(length: int) -> None:
    server = make()
    prompt = tuple(range(length))
    server.submit(ask("0", prompt, 9))
    for name in "123":
        server.submit(ask(name, prompt, 9, shares_prompt_of="0"))
    plans = [server.step() for _ in range(20)]
    assert sum(chunk.count for plan in plans for chunk in plan.chunks) == length
    for name in "0123":
        assert server.outputs[name] == expected_output(prompt, 9, stop=False)


def test_a_choice_whose_sibling_has_gone_computes_what_the_prefix_cache_lacks() -> None:
    server = make(num_slots=1)
    server.submit(ask("0", tuple(range(13)), 3))
    server.submit(ask("1", tuple(range(13)), 3, shares_prompt_of="0"))
    plans = [server.step() for _ in range(20)]
    assert sum(chunk.count for plan in plans for chunk in plan.chunks) == 13 + 1
    assert server.outputs["1"] == expected_output(tuple(range(13)), 3, stop=False)


def test_a_scored_prompt_reuses_only_what_nobody_asks_about() -> None:
    server = make()
    prompt = tuple(range(13))
    server.submit(ask("a", prompt, 2))
    server.run_dry()
    server.submit(ask("b", prompt, 0, score_from=9))
    plans = [server.step() for _ in range(6)]
    assert sum(chunk.count for plan in plans for chunk in plan.chunks) == 13 - 8
    assert server.scores["b"] == [-9.0, -10.0, -11.0, -12.0]
    assert server.outputs["b"] == [] and server.finishes["b"] == [FinishReason.LENGTH]


def test_tokens_survive_a_preemption_and_the_order_holds() -> None:
    server = make(num_pages=6, page_size=2, num_slots=3, steps=2)
    for name, prompt in (("a", (1, 2)), ("b", (3, 4)), ("c", (5, 6))):
        server.submit(ask(name, prompt, 8))
    server.run_dry()
    assert server.num_preempted > 0
    for name, prompt in (("a", (1, 2)), ("b", (3, 4)), ("c", (5, 6))):
        assert server.outputs[name] == expected_output(prompt, 8, stop=False)


def test_a_sequence_preempted_while_its_draft_is_checked_keeps_the_tokens_and_begins_again() -> None:
    server = make(num_pages=4, num_slots=2, steps=4, speculation=eager(4))
    server.submit(ask("old", (1, 2, 3, 4), 12))
    server.submit(ask("young", (0, 0, 0), 9))  # continues with zeros, as drafted
    server.reads_first = True
    while server.in_flight is None or not any(row.draft for row in server.in_flight[0].rows):
        server.step()
    ((row, sampled),) = [
        (row, sampled) for row, sampled in zip(server.in_flight[0].rows, server.in_flight[2]) if row.draft
    ]
    assert row.sequence.request.request_id == "young" and len(sampled.tokens) == 5, (
        "all of the draft is right"
    )
    server.reads_first = False
    (preempted,) = server.step().preempted
    assert preempted == (row.sequence, row.position + 1)
    assert server.outputs["young"] == [0] * 6
    assert server.scheduler.backlog().prefill == 3 + 6, "all of it is to be computed again"
    server.run_dry()
    for name, prompt, count in (("old", (1, 2, 3, 4), 12), ("young", (0, 0, 0), 9)):
        assert server.outputs[name] == expected_output(prompt, count, stop=False)


@pytest.mark.parametrize(("num_draft", "num_turns"), [(1, 1), (4, 1), (4, 2), (3, 3)])
def test_a_draft_model_gives_the_same_text_in_fewer_rounds(num_draft: int, num_turns: int) -> None:
    counts = []
    for speculation in (None, eager(num_draft, num_turns=num_turns)):
        server = make(speculation=speculation)
        server.submit(ask("a", (1, 2, 3), 40))
        server.reads_first = True
        counts.append(0)
        while server.scheduler.has_work:
            counts[-1] += 1
            server.step()
        assert server.outputs["a"] == expected_output((1, 2, 3), 40, stop=False)
    plain, drafted = counts
    assert drafted < plain * 0.7


def test_a_draft_model_first_sees_what_was_decoded_without_it() -> None:
    server = make(speculation=(speculation := eager(3, num_turns=1)))
    speculation.max_rows = 0
    server.submit(ask("a", (1, 2, 3), 40))
    server.reads_first = True
    for _ in range(8):
        server.step()
    speculation.max_rows = 1
    (row,) = server.step().rows
    assert row.missed == range(3, row.position - 1)
    (row,) = server.step().rows
    assert row.reach and not row.missed


def test_pages_that_a_draft_model_has_not_seen_are_found_again_and_shown_to_it() -> None:
    server = make(speculation=(speculation := eager(3, num_turns=1)))
    speculation.max_rows = 0
    server.submit(ask("a", (1, 2, 3, 4), 8))
    server.run_dry()
    speculation.max_rows = 1
    server.submit(ask("b", (1, 2, 3, 4, *server.outputs["a"], 1), 8))
    server.reads_first = True
    (chunk,) = server.step().chunks
    assert chunk.start == 8
    (row,) = server.step().rows
    assert row.missed == range(4, 12), (
        "it saw the prompt of the first one, and of the second nothing in a row"
    )


def test_a_cancelled_request_returns_its_pages_at_once() -> None:
    server = make()
    server.submit(ask("a", max_tokens=50))
    server.step()
    server.step()
    ended = server.scheduler.end("a", FinishReason.CANCELLED)
    assert ended is not None and ended.finish is FinishReason.CANCELLED
    assert server.scheduler.pool.num_held == 0
    assert server.scheduler.end("a", FinishReason.CANCELLED) is None
    server.run_dry()
    assert server.finishes["a"] == []


def test_a_request_past_its_deadline_never_prefills() -> None:
    server = make(num_slots=1)
    server.submit(ask("a", max_tokens=30))
    server.submit(ask("b", deadline=10.0))
    server.step()
    assert server.scheduler.expire(now=9.0) == []
    server.deliver(server.scheduler.expire(now=10.0))
    assert server.finishes["b"] == [FinishReason.DEADLINE]
    server.run_dry()
    assert server.outputs["b"] == []


def test_a_request_larger_than_the_pool_does_not_fit() -> None:
    scheduler = make(num_pages=4, page_size=4).scheduler
    assert scheduler.fits(ask("a", tuple(range(10)), 6))
    assert not scheduler.fits(ask("a", tuple(range(10)), 7))


def poison(server: Server, request: GenerationRequest) -> list[int]:
    """Poisons a request's results in the in-flight round; returns its pages, none if it is not in flight."""
    if server.in_flight is None:
        return []
    plan, chunks, rows = server.in_flight
    for planned, results in ((plan.chunks, chunks), (plan.rows, rows)):
        for index, one in enumerate(planned):
            if one.sequence.request is request:
                results[index] = results[index]._replace(tokens=(), is_poisoned=True)
                return list(one.sequence.pages)
    return []


@pytest.mark.parametrize("at", ["row", "last chunk", "first chunk"])
def test_a_poisoned_sequence_fails_alone_and_its_pages_are_cleared_and_forgotten(at: str) -> None:
    server = make(busy_tokens=8, idle_tokens=8)
    scheduler = server.scheduler
    server.submit(ask("good", (1, 2, 3, 4, 5, 6), 12))
    server.step()
    bad = ask("bad", tuple(range(3, 16)), 12, score_from=1)  # two chunks of 8
    server.submit(bad)
    for _ in range({"first chunk": 1, "last chunk": 2, "row": 5}[at]):
        server.step()
    pages = poison(server, bad)
    assert pages
    server.step()
    assert server.finishes["bad"] == [FinishReason.POISONED]
    assert set(server.step().tainted) >= set(pages)
    assert scheduler.pool.match(bad.prompt, 12).pages == []
    server.run_dry()
    assert server.finishes["good"] == [FinishReason.LENGTH]
    assert server.outputs["good"] == expected_output((1, 2, 3, 4, 5, 6), 12, stop=False)
    assert scheduler.pool.num_held == 0


def test_a_stop_token_before_the_poison_is_the_end() -> None:
    server = make(steps=4)
    prompt = next((start,) for start in range(13) if STOP in expected_output((start,), 8, stop=False)[1:4])
    server.submit(ask("a", prompt, 20, stop_ids=frozenset({STOP})))
    server.step()
    server.step()
    assert server.in_flight is not None
    _, _, rows = server.in_flight
    kept = [*rows[0].tokens]
    rows[0] = rows[0]._replace(tokens=kept[: kept.index(STOP) + 1], is_poisoned=True)
    server.step()
    assert server.finishes["a"] == [FinishReason.STOP]


def test_ending_everything_leaves_nothing() -> None:
    server = make(num_slots=2)
    for name in "abcd":
        server.submit(ask(name))
    server.step()
    assert len(server.scheduler.end_all(FinishReason.SHUTDOWN)) == 4
    server.scheduler.check()
    assert not server.scheduler.has_work and server.scheduler.pool.num_held == 0


@st.composite
def speculations(draw: st.DrawFn) -> Speculation | None:
    """None, or drafts from the text so far or by a model, in rounds of up to some number of rows."""
    num_draft = draw(st.integers(0, 4))
    if not num_draft:
        return None
    return eager(num_draft, draw(st.integers(1, 5)), draw(st.integers(0, 3)))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Server, list[tuple[str, object]]]:
    page_size = draw(st.sampled_from([1, 2, 4]))
    server = make(
        num_pages=draw(st.integers(40 // page_size, 60 // page_size)),
        page_size=page_size,
        num_slots=draw(st.integers(1, 5)),
        steps=draw(st.integers(1, 4)),
        busy_tokens=draw(st.integers(1, 12)),
        speculation=draw(speculations()),
    )
    events: list[tuple[str, object]] = []
    for number in range(draw(st.integers(1, 10))):
        prompt = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=18)))
        stops = frozenset({STOP}) if draw(st.booleans()) else frozenset()
        deadline = draw(st.none() | st.integers(1, 40))
        scored = draw(st.none() | st.integers(1, 20))
        priority = draw(st.sampled_from([0, 0, 0, -3, 5]))
        more = {"stop_ids": stops, "deadline": deadline, "score_from": scored, "priority": priority}
        events.append(("submit", ask(str(number), prompt, draw(st.integers(0, 20)), **more)))
        if draw(st.booleans()):
            twin = ask(
                f"{number}-twin",
                prompt,
                draw(st.integers(0, 20)),
                shares_prompt_of=str(number),
                deadline=deadline,
                priority=priority,
            )
            events.append(("submit", twin))
        events += [("step", reads_first) for reads_first in draw(st.lists(st.booleans(), max_size=4))]
        if draw(st.integers(0, 4)) == 0:
            events.append(("cancel", str(draw(st.integers(0, number)))))
        if draw(st.integers(0, 4)) == 0:
            events.append(("poison", str(draw(st.integers(0, number)))))
    return server, events


@settings(max_examples=300)
@given(schedules())
def test_every_request_ends_once_with_its_own_tokens_over_random_schedules(
    schedule: tuple[Server, list[tuple[str, object]]],
) -> None:
    server, events = schedule
    requests: dict[str, GenerationRequest] = {}
    for clock, (kind, value) in enumerate(events):
        if kind == "submit":
            assert isinstance(value, GenerationRequest)
            requests[value.request_id] = value
            server.submit(value)
        elif kind == "cancel":
            end = server.scheduler.end(str(value), FinishReason.CANCELLED)
            server.deliver([end] if end is not None else [])
        elif kind == "poison":
            poison(server, requests[str(value)])
        else:
            server.reads_first = bool(value)
            server.step()
        server.deliver(server.scheduler.expire(now=float(clock)))
        server.scheduler.check()
    server.run_dry()
    assert server.scheduler.pool.num_held == 0
    for name, request in requests.items():
        assert len(server.finishes[name]) == 1
        whole = expected_output(request.prompt, request.max_tokens, stop=bool(request.stop_ids))
        got = server.outputs[name]
        if server.finishes[name][0] in (FinishReason.STOP, FinishReason.LENGTH):
            assert got == whole
            first = request.score_from
            wanted = range(first, len(request.prompt)) if first is not None else ()
            assert server.scores[name] == [-float(position) for position in wanted]
        else:
            assert got == whole[: len(got)]


@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_first_tokens_come_in_the_order_of_arrival(lengths: list[int]) -> None:
    server = make(num_pages=64, num_slots=8)
    for number, length in enumerate(lengths):
        server.submit(ask(str(number), tuple([number] * length), 2))
    order: list[str] = []
    while server.scheduler.has_work:
        order += [chunk.sequence.request.request_id for chunk in server.step().chunks if chunk.is_last]
    assert order == [str(number) for number in range(len(lengths))]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_number_of_steps_in_a_round_does_not_change_the_text(steps: int) -> None:
    server = make(steps=steps)
    server.submit(ask("a", (4, 4, 4), 17))
    server.run_dry()
    assert server.outputs["a"] == expected_output((4, 4, 4), 17, stop=False)
