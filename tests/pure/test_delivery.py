"""Delivery of a round's updates: all reach their streams, in order; one stream's failure harms no other."""

from __future__ import annotations

import logging

import pytest

from levserve.device.delivery import AddressedBatch, Delivery
from levserve.engine.stream import TokenStream
from levserve.schedule.request import FinishReason, TokenBatch


class Broken(TokenStream):
    def put(self, index: int, batch: TokenBatch) -> None:
        raise RuntimeError("out of order")


def make(kind: type[TokenStream] = TokenStream) -> TokenStream:
    return kind(["0"], lambda *told: None)


def test_what_was_sent_has_arrived_in_order_when_it_leaves() -> None:
    streams = [make(), make()]
    with Delivery() as delivery:
        for token in range(100):
            delivery.send([AddressedBatch(stream, 0, TokenBatch((token,))) for stream in streams])
        delivery.send([])
        delivery.send(
            [AddressedBatch(stream, 0, TokenBatch((), finish=FinishReason.LENGTH)) for stream in streams]
        )
    for stream in streams:
        *batches, end = (batch for _, batch in stream)
        assert [batch.tokens for batch in batches] == [(token,) for token in range(100)]
        assert end.finish is FinishReason.LENGTH


def test_a_stream_that_fails_is_told_of_and_the_others_get_their_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = make()
    with caplog.at_level(logging.ERROR), Delivery() as delivery:
        delivery.send(
            [AddressedBatch(make(Broken), 0, TokenBatch((1,))), AddressedBatch(stream, 0, TokenBatch((2,)))]
        )
        delivery.send([AddressedBatch(stream, 0, TokenBatch((3,)))])
    assert [stream.get(0)[1].tokens for _ in range(2)] == [(2,), (3,)]
    assert "out of order" in caplog.text
