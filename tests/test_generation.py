"""From token batches to text: what is shown, when it ends, and what an unanswered end becomes."""

from __future__ import annotations

import pytest

from levserve.engine.stream import TokenStream
from levserve.errors import DeadlineExceeded, ServeError, Unavailable
from levserve.generation import Choice, ClientGone, Delta, generate
from levserve.schedule.request import FinishReason, TokenBatch
from levserve.text.stops import StopStrings
from levserve.text.tokenizer import load_tokenizer
from tests.conftest import GOLDEN

TOKENIZER = load_tokenizer(GOLDEN / "llama")


def choice(*stops: str) -> Choice:
    return Choice(TOKENIZER.detokenizer(), StopStrings(stops))


def run(batches: list[tuple[int, TokenBatch]], choices: list[Choice]) -> tuple[list[tuple[int, Delta]], list[str]]:
    """All deltas of a stream that holds these batches, and which sequences were closed on the way."""
    closed: list[str] = []
    stream = TokenStream([str(index) for index in range(len(choices))], closed.append)
    for index, batch in batches:
        stream.put(index, batch)
    return list(generate(stream, choices)), closed


def test_deltas_join_to_the_text_and_the_last_says_why() -> None:
    deltas, closed = run([(0, TokenBatch((10, 11))), (0, TokenBatch((12,), finish=FinishReason.LENGTH))], [choice()])
    assert "".join(delta.text for _, delta in deltas) == "t10 t11 t12"
    assert [delta.finish for _, delta in deltas] == [None, FinishReason.LENGTH]
    assert closed == []


def test_a_stop_string_ends_a_choice_inside_a_batch_and_closes_its_sequence() -> None:
    only = choice("t12")
    deltas, closed = run([(0, TokenBatch((10, 11, 12, 13)))], [only])
    assert "".join(delta.text for _, delta in deltas) == "t10 t11 "
    assert deltas[-1][1].finish is FinishReason.STOP
    assert only.num_tokens == 3, "the token that completes the stop is the last one counted"
    assert closed == ["0", "0"]  # once for the choice, once on the way out


def test_text_held_back_for_a_stop_that_never_comes_is_shown_at_the_end() -> None:
    deltas, _ = run([(0, TokenBatch((10,))), (0, TokenBatch((1,), finish=FinishReason.LENGTH))], [choice("t10 t99")])
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
    ],
)
def test_an_end_that_is_no_answer_is_an_error(finish: FinishReason, error: type[ServeError]) -> None:
    with pytest.raises(error):
        run([(0, TokenBatch((), finish=finish))], [choice()])


def test_a_deadline_after_some_tokens_ends_with_what_there_is() -> None:
    deltas, _ = run([(0, TokenBatch((10,))), (0, TokenBatch((), finish=FinishReason.DEADLINE))], [choice()])
    assert deltas[-1][1].finish is FinishReason.LENGTH


def test_leaving_early_closes_every_open_sequence() -> None:
    closed: list[str] = []
    stream = TokenStream(["a", "b"], closed.append)
    stream.put(0, TokenBatch((10,)))
    deltas = generate(stream, [choice(), choice()])
    next(deltas)
    deltas.close()  # type: ignore[attr-defined]
    assert sorted(closed) == ["a", "b"]
