"""After a change of weights, no request begins on pages that the old weights computed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from levserve.schedule.commit import Sampled
from levserve.schedule.pages import PagePool
from levserve.schedule.sequence import RoundPlan
from tests.pure.test_pages import fill
from tests.pure.test_scheduler import FakeRounds, Server, ask, make


class VersionedRounds(FakeRounds):
    """Records which weights wrote each KV slot, and the oldest weights that a request's tokens depend on."""

    version = 0

    def run(self, plan: RoundPlan) -> tuple[list[Sampled], list[Sampled]]:
        self.fresh: dict[tuple[int, int], int] = {}
        results = super().run(plan)
        for fork in plan.forks:
            for offset in range(self.page_size):
                place = fork.target_page, offset
                self.made[place] = self.fresh.get(
                    place, self.made.get((fork.source_page, offset), self.version)
                )
        for chunk in plan.chunks:
            self._note(chunk.sequence.request.request_id, chunk.sequence.pages, chunk.start + chunk.count)
        for row in plan.rows:
            self._note(row.sequence.request.request_id, row.sequence.pages, row.position + row.steps)
        return results

    def _write(self, pages: list[int], position: int, token: int) -> None:
        super()._write(pages, position, token)
        place = pages[position // self.page_size], position % self.page_size
        self.made[place] = self.fresh[place] = self.version

    def _note(self, name: str, pages: list[int], length: int) -> None:
        places = [
            (pages[position // self.page_size], position % self.page_size) for position in range(length)
        ]
        self.oldest[name] = min(self.oldest.get(name, self.version), *(self.made[place] for place in places))


def reloadable(**sizes: int) -> tuple[Server, VersionedRounds]:
    server = make(**sizes)
    server.rounds = rounds = VersionedRounds(server.scheduler)
    rounds.made, rounds.oldest = {}, {}
    return server, rounds


def reload(server: Server, rounds: VersionedRounds) -> None:
    rounds.version += 1
    server.scheduler.forget_prefixes()
    server.scheduler.check()


def test_a_forgotten_prefix_is_not_found_and_its_pages_are_free() -> None:
    pool = PagePool(8, 4)
    held = fill(pool, list(range(10)))
    pool.release(fill(pool, list(range(20, 30))))
    pool.forget()
    pool.check([held])
    assert pool.num_idle == 0 and pool.num_held == len(held)
    assert pool.match(list(range(10)), 9).pages == pool.match(list(range(20, 30)), 9).pages == []
    pool.release(held)
    pool.check([])
    assert pool.num_available == 8 and pool.num_idle == 0


def test_what_runs_goes_on_and_what_comes_later_computes_its_own() -> None:
    server, rounds = reloadable()
    prompt = tuple(range(12))
    server.submit(ask("old", prompt, 12))
    for _ in range(6):
        server.step()
    reload(server, rounds)
    server.submit(ask("new", prompt, 12))
    server.run_dry()
    assert server.outputs["old"] == server.outputs["new"] and len(server.outputs["old"]) == 12
    assert (rounds.oldest["old"], rounds.oldest["new"]) == (0, 1)
    server.submit(ask("newer", prompt, 1))
    assert server.step().placed[0].num_cached == 8  # computed by "new"


def test_a_page_that_two_sets_of_weights_filled_is_nobody_elses() -> None:
    server, rounds = reloadable(busy_tokens=2, idle_tokens=2)
    server.submit(ask("old", tuple(range(12)), 12))
    server.step()  # half of its first page
    reload(server, rounds)
    for _ in range(4):
        server.step()
    server.submit(ask("new", tuple(range(12)), 2))
    server.run_dry()
    assert (rounds.oldest["old"], rounds.oldest["new"]) == (0, 1)


def test_a_choice_does_not_begin_on_the_stale_pages_of_its_sibling() -> None:
    server, rounds = reloadable(num_slots=2)
    server.submit(ask("first", (1, 2, 3, 4), 20))
    server.submit(ask("other", (9,), 6))
    server.submit(ask("second", (1, 2, 3, 4), 20, shares_prompt_of="first"))
    for _ in range(3):
        server.step()
    reload(server, rounds)
    server.run_dry()
    server.submit(ask("new", (1, 2, 3, 4, 5), 2))
    server.run_dry()
    assert (rounds.oldest["first"], rounds.oldest["second"], rounds.oldest["new"]) == (0, 1, 1)


@settings(max_examples=200)
@given(
    events=st.lists(
        st.one_of(st.just("step"), st.just("reload"), st.tuples(st.integers(1, 14), st.booleans())),
        max_size=40,
    ),
    steps=st.integers(1, 3),
    page_size=st.sampled_from([1, 2, 4]),
    budget=st.sampled_from([2, 4]),
)
def test_no_request_sees_weights_older_than_itself(
    events: list[str | tuple[int, bool]], steps: int, page_size: int, budget: int
) -> None:
    sizes = {"num_pages": 48 // page_size, "page_size": page_size, "num_slots": 3, "steps": steps}
    server, rounds = reloadable(**sizes, busy_tokens=budget, idle_tokens=budget)
    asked_at: dict[str, int] = {}
    for number, event in enumerate(events):
        if event == "step":
            server.step()
        elif event == "reload":
            reload(server, rounds)
        else:
            length, has_twin = event
            for name, first in ((f"{number}", None), (f"{number}-twin", f"{number}"))[: 1 + bool(has_twin)]:
                asked_at[name] = rounds.version
                server.submit(ask(name, tuple(range(int(length))), 8, shares_prompt_of=first))
    server.run_dry()
    for name, version in asked_at.items():
        assert rounds.oldest[name] >= version
