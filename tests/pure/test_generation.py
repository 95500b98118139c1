"""From token batches to text: what is shown, when it ends, and which ends are errors."""

from __future__ import annotations

import queue
import time
from array import array
from typing import Any

import pytest

from levserve import generation
from levserve.engine.stream import TokenStream
from levserve.errors import DeadlineExceeded, Poisoned, ServeError, Unavailable
from levserve.generation import Choice, ClientGone, Delta, Deltas, Echo
from levserve.schedule.request import FinishReason, PooledHidden, TokenBatch, TokenLogprob
from levserve.text.stops import StopStrings
from levserve.text.tokenizer import load_tokenizer
from tests.conftest import GOLDEN

TOKENIZER = load_tokenizer(GOLDEN / "llama")
ECHO = Echo("t7 t8", (7, 8), (0, 2))


def choice(*stops: str, **options: Any) -> Choice:
    return Choice(TOKENIZER.detokenizer(continues="echo" in options), StopStrings(stops), **options)


def logprobs(*values: float) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(value, ((9, -0.25), (10, -0.5))) for value in values)


def run(
    batches: list[tuple[int, TokenBatch]], choices: list[Choice]
) -> tuple[list[tuple[int, Delta]], list[str]]:
    """All deltas of a stream that holds these batches, and which sequences were closed on the way."""
    closed: list[str] = []
    stream = TokenStream(
        [str(index) for index in range(len(choices))], lambda request_id, finish: closed.append(request_id)
    )
    for index, batch in batches:
        stream.put(index, batch)
    return list(Deltas(stream, choices)), closed


def test_deltas_join_to_the_text_and_the_last_says_why() -> None:
    deltas, closed = run(
        [(0, TokenBatch((10, 11))), (0, TokenBatch((12,), finish=FinishReason.LENGTH))], [choice()]
    )
    assert "".join(delta.text for _, delta in deltas) == "t10 t11 t12"
    assert [delta.finish for _, delta in deltas] == [None, FinishReason.LENGTH]
    assert closed == []


def test_a_stop_string_ends_a_choice_inside_a_batch_and_closes_its_sequence() -> None:
    only = choice("t12")
    deltas, closed = run([(0, TokenBatch((10, 11, 12, 13)))], [only])
    assert "".join(delta.text for _, delta in deltas) == "t10 t11 "
    assert deltas[-1][1].finish is FinishReason.STOP
    assert only.num_tokens == 3, "the token that completes the stop is the last one counted"
    assert closed == ["0"]


def test_text_held_back_for_a_stop_that_never_comes_is_shown_at_the_end() -> None:
    deltas, _ = run(
        [(0, TokenBatch((10,))), (0, TokenBatch((1,), finish=FinishReason.LENGTH))], [choice("t10 t99")]
    )
    assert "".join(delta.text for _, delta in deltas) == "t10"


def test_choices_of_one_request_do_not_mix() -> None:
    batches = [
        (1, TokenBatch((20,))),
        (0, TokenBatch((10,), finish=FinishReason.STOP)),
        (1, TokenBatch((21,), finish=FinishReason.LENGTH)),
    ]
    choices = [choice(), choice()]
    deltas, _ = run(batches, choices)
    texts = ["".join(delta.text for index, delta in deltas if index == number) for number in (0, 1)]
    assert texts == ["t10", "t20 t21"]
    assert [one.finish for one in choices] == [FinishReason.STOP, FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("finish", "error"),
    [
        (FinishReason.FAILED, ServeError),
        (FinishReason.SHUTDOWN, Unavailable),
        (FinishReason.CANCELLED, ClientGone),
        (FinishReason.DEADLINE, DeadlineExceeded),
        (FinishReason.POISONED, Poisoned),
    ],
)
def test_an_end_that_is_no_answer_is_an_error(finish: FinishReason, error: type[ServeError]) -> None:
    with pytest.raises(error):
        run([(0, TokenBatch((), finish=finish))], [choice()])


def test_a_deadline_after_some_tokens_ends_with_what_there_is() -> None:
    deltas, _ = run([(0, TokenBatch((10,))), (0, TokenBatch((), finish=FinishReason.DEADLINE))], [choice()])
    assert deltas[-1][1].finish is FinishReason.DEADLINE


def test_a_deadline_before_all_wanted_scores_is_an_error() -> None:
    first, other = choice(num_scores=2), choice()
    scored = TokenBatch((20,), prompt_logprobs=(TokenLogprob(-1.0),))
    late = TokenBatch((), finish=FinishReason.DEADLINE)
    with pytest.raises(DeadlineExceeded, match="before its prompt was scored"):
        run([(1, TokenBatch((10,))), (0, scored), (0, late)], [first, other])
    whole = choice(num_scores=1)
    deltas, _ = run([(0, scored), (0, late)], [whole])
    assert deltas[-1][1].finish is FinishReason.DEADLINE


def test_a_deadline_that_some_choices_never_began_before_ends_all_with_what_there_is() -> None:
    late = TokenBatch((), finish=FinishReason.DEADLINE)
    deltas, _ = run([(1, TokenBatch((20,))), (0, late), (1, late)], [choice(), choice()])
    assert [(index, delta.text, delta.finish) for index, delta in deltas[1:]] == [
        (0, "", late.finish),
        (1, "", late.finish),
    ]
    with pytest.raises(DeadlineExceeded):
        run([(0, late), (1, late)], [choice(), choice()])


def test_a_device_that_does_not_end_a_late_request_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "GRACE_SECONDS", 0.02)
    deltas = Deltas(TokenStream(["a"], lambda _: None), [choice()], deadline=time.monotonic())
    assert not deltas.wait(0.001)
    with pytest.raises(DeadlineExceeded, match="device does not answer"):
        next(deltas)


@pytest.mark.parametrize("count, num_top", [(0, 0), (1, 1), (5, 2)])
def test_only_as_many_alternatives_as_were_asked_for_are_shown(count: int, num_top: int) -> None:
    (delta,) = (
        delta
        for _, delta in run(
            [(0, TokenBatch((10,), logprobs(-0.5), FinishReason.LENGTH))], [choice(num_logprobs=count)]
        )[0]
    )
    (shown,) = delta.logprobs
    assert shown is not None and (shown.logprob, len(shown.top)) == (-0.5, num_top)


def test_log_probabilities_that_nobody_asked_to_see_only_rank_the_choice() -> None:
    unseen = choice()
    deltas, _ = run([(0, TokenBatch((10, 11), logprobs(-1.0, -2.0), FinishReason.LENGTH))], [unseen])
    assert deltas[0][1].logprobs == ()
    assert unseen.mean_logprob == -1.5
    assert choice().mean_logprob < -1e9


def test_an_echo_waits_for_the_prompts_scores_and_comes_with_the_first_token() -> None:
    batches = [
        (0, TokenBatch((), prompt_logprobs=logprobs(-3.0))),
        (0, TokenBatch((9,), logprobs(-0.5))),
        (0, TokenBatch((), finish=FinishReason.LENGTH)),
    ]
    deltas, _ = run(batches, [choice(num_logprobs=0, echo=ECHO)])
    assert deltas[0][1] == Delta(
        "t7 t8 t9",
        (7, 8, 9),
        (None, TokenLogprob(-3.0), TokenLogprob(-0.5)),
        None,
        (0, 2, 5),
        num_echoed=2,
    )
    assert len(deltas) == 2 and deltas[1][1].text == ""


def test_a_stop_string_is_not_looked_for_in_the_echo() -> None:
    deltas, _ = run([(0, TokenBatch((9, 10), finish=FinishReason.LENGTH))], [choice("t8", "8 t9", echo=ECHO)])
    assert deltas[0][1].text == "t7 t8 t9 t10"


def test_an_echo_alone_ends_without_a_token() -> None:
    only = choice(num_logprobs=1, echo=ECHO)
    deltas, _ = run([(0, TokenBatch((), finish=FinishReason.LENGTH, prompt_logprobs=logprobs(-3.0)))], [only])
    assert (deltas[0][1].text, deltas[0][1].tokens, only.num_tokens) == ("t7 t8", (7, 8), 0)


def test_a_stop_token_that_ends_a_choice_here_is_listed_but_neither_shown_nor_counted() -> None:
    only = choice(stop_ids=frozenset((11,)), num_logprobs=0)
    deltas, closed = run([(0, TokenBatch((10, 11, 12), logprobs(-1.0, -2.0, -3.0)))], [only])
    assert deltas == [
        (0, Delta("t10", (10, 11), (TokenLogprob(-1.0), TokenLogprob(-2.0)), FinishReason.STOP, (0, 3)))
    ]
    assert (only.num_tokens, only.mean_logprob, closed) == (1, -1.0, ["0"])


def test_scores_and_pooled_states_of_a_prompt_are_kept() -> None:
    pooled = PooledHidden(array("f", [1.0]), array("f", [2.0]))
    only = choice()
    parts = [
        TokenBatch((), prompt_logprobs=logprobs(-1.0, -2.0)),
        TokenBatch((), (), FinishReason.LENGTH, 0, logprobs(-3.0), pooled),
    ]
    run([(0, part) for part in parts], [only])
    assert [score.logprob for score in only.prompt_logprobs] == [-1.0, -2.0, -3.0]
    assert only.hidden is pooled


def test_waiting_says_that_nothing_came_and_takes_nothing_away() -> None:
    stream = TokenStream(["0"], lambda *told: None)
    deltas = Deltas(stream, [choice()])
    assert not deltas.wait(0)
    stream.put(0, TokenBatch((10,), finish=FinishReason.LENGTH))
    assert deltas.wait(0) and deltas.wait(0)
    assert next(deltas)[1].text == "t10"
    assert deltas.wait(None), "the end has come"
    assert list(deltas) == []


def test_waiting_is_not_prolonged_by_batches_that_say_nothing() -> None:
    class Dripping(TokenStream):
        """Has scores of another part of the prompt every 5 ms."""

        def get(
            self, timeout_seconds: float | None = None, on_batch: object = None
        ) -> tuple[int, TokenBatch]:
            assert timeout_seconds is not None
            time.sleep(min(timeout_seconds, 0.005))
            if timeout_seconds < 0.005:
                raise queue.Empty
            return 0, TokenBatch((), prompt_logprobs=logprobs(-1.0))

    started = time.monotonic()
    assert not Deltas(Dripping(["0"], lambda _: None), [choice()]).wait(0.02)
    assert 0.015 <= time.monotonic() - started < 5


def test_a_failure_is_told_to_who_waits() -> None:
    stream = TokenStream(["0"], lambda *told: None)
    stream.put(0, TokenBatch((), finish=FinishReason.FAILED))
    with pytest.raises(ServeError):
        Deltas(stream, [choice()]).wait(1)


def test_the_time_of_the_first_token_is_noted_once() -> None:
    stream = TokenStream(["0"], lambda *told: None)
    for tokens in ((10,), (11,)):
        stream.put(0, TokenBatch(tokens))
    deltas = Deltas(stream, [choice()])
    assert deltas.first_token_at is None
    next(deltas)
    first = deltas.first_token_at
    next(deltas)
    assert first is not None and deltas.first_token_at == first <= time.monotonic()
