"""A stream whose middle is sent by the thread that delivers its tokens: its client must see no difference."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levserve.answers.answer import ChatAnswer
from levserve.engine.stream import TokenStream
from levserve.generation import Choice, Delta, Deltas
from levserve.request.chat_message import Message
from levserve.request.schema import ChatBody
from levserve.schedule.request import FinishReason, TokenBatch
from levserve.text.detokenizer import Detokenizer, Spelling
from levserve.text.parts import Content, Thought
from levserve.text.stops import StopStrings
from levserve.web import sse
from levserve.web.events import ChunkStream, StreamKind
from levserve.web.heartbeat import PING, Heartbeat
from levserve.web.messages.answer import MessageAnswer
from levserve.web.messages.events import MessageEvents
from levserve.web.relay import Relay
from levserve.web.request_log import RequestLog
from levserve.web.responses.body import ResponseBody
from levserve.web.responses.events import ResponseStream
from levserve.web.responses.exchange import Exchange
from levserve.web.responses.store import ResponseStore
from levserve.web.run import Run
from tests.fake_device import serve_toy
from tests.pure.test_message_events import join_events, make_run
from tests.waiting import wait_until

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
MODEL = serve_toy("toy", 64)
BODY = ChatBody(model="toy", messages=[Message(role="user", content="t1")], stream=True)


def make_narrow(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel makes it a few KB


class Wire:
    """A stream over a socket pair, from the device's end to the client's; `write` plays gunicorn's part."""

    def __init__(
        self,
        spell: Callable[[int], bytes],
        *,
        heartbeat: float = 0,
        stops: Sequence[str] = (),
        is_narrow: bool = False,
        kind: StreamKind | None = None,
    ) -> None:
        self.ours, self.clients = socket.socketpair()
        if is_narrow:
            make_narrow(self.ours)
        self.closed: list[str] = []
        self.tokens = TokenStream(["0"], lambda request_id, finish: self.closed.append(finish))
        choice = Choice(Detokenizer(spell, Spelling(is_byte_level=True)), StopStrings(stops))
        request_log = RequestLog("id", "POST", "/", choices=[choice])
        run = Run(BODY, MODEL, [[1]], [choice], Deltas(self.tokens, [choice]), request_log)
        beat = Heartbeat(heartbeat, time.monotonic())
        self.pieces = sse.stream(run, kind or ChunkStream(ChatAnswer), beat, self.ours)
        self.num_written = 0

    def write(self) -> None:
        head = HEAD
        for piece in self.pieces:
            self.ours.sendall(head + b"%X\r\n%b\r\n" % (len(piece), piece))
            head, self.num_written = b"", self.num_written + 1
        self.ours.sendall(b"0\r\n\r\n")

    def read(self, size: int = 2**16, pause: Callable[[], None] = lambda: None) -> list[str]:
        """The events and comments of the answer, read `size` bytes at a time."""
        with http.client.HTTPResponse(self.clients) as response:
            response.begin()
            body = b""
            while piece := response.read1(size):
                body += piece
                pause()
        *events, rest = body.decode().split("\n\n")
        assert rest == ""
        return events


@contextmanager
def wired(spell: Callable[[int], bytes], **options: object) -> Iterator[tuple[Wire, ThreadPoolExecutor]]:
    """The wire, and threads for its two ends, which end even if a test fails."""
    wire = Wire(spell, **options)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool, closing(wire.ours), closing(wire.clients):
        try:
            yield wire, pool
        except BaseException:
            wire.tokens.put(0, TokenBatch((), finish=FinishReason.CANCELLED))
            wire.ours.shutdown(socket.SHUT_RDWR)
            raise


def text_of(events: Sequence[str]) -> str:
    """The text of a chat's events, which must begin with the role, name one end and be done."""
    opening, *middle, ending, done = [event for event in events if not event.startswith(":")]
    assert json.loads(opening.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(ending.removeprefix("data: "))["choices"][0]["finish_reason"] is not None
    assert done == "data: [DONE]"
    return "".join(
        json.loads(event.removeprefix("data: "))["choices"][0]["delta"]["content"] for event in middle
    )


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 6000), min_size=1, max_size=12), read_size=st.sampled_from([7, 500, 2**16])
)
def test_a_client_gets_every_byte_once_and_in_order_however_slowly_it_reads(
    sizes: list[int], read_size: int
) -> None:
    def spell(token: int) -> bytes:
        return (b"%d:" % token).ljust(sizes[token], b"x") if sizes[token] else b""

    with wired(spell, is_narrow=True) as (wire, pool):
        written = pool.submit(wire.write)
        answer = pool.submit(wire.read, read_size, lambda: time.sleep(0.0001))
        for token in range(len(sizes)):
            wire.tokens.put(0, TokenBatch((token,)))
        wire.tokens.put(0, TokenBatch((), finish=FinishReason.LENGTH))
        written.result(20)
        assert text_of(answer.result(20)) == "".join(spell(token).decode() for token in range(len(sizes)))


def test_a_response_is_stored_as_it_was_streamed_however_slowly_its_client_reads() -> None:
    """Its events are numbered and gather the text, so each must be made once, even if there is no room."""
    store = ResponseStore(1, 2**20)
    body = msgspec.json.decode(b'{"model": "toy", "input": "t1", "stream": true}', type=ResponseBody)
    exchange = Exchange(body, store, "")
    text = "".join(f"{token} " for token in range(200))
    with wired(lambda token: b"%d " % token, is_narrow=True, kind=ResponseStream(exchange)) as (wire, pool):
        written = pool.submit(wire.write)
        for token in range(200):
            wire.tokens.put(0, TokenBatch((token,)))
        wire.tokens.put(0, TokenBatch((), finish=FinishReason.LENGTH))
        answer = pool.submit(wire.read, 500, lambda: time.sleep(0.0001))
        written.result(20)
        events = [json.loads(event.partition("\ndata: ")[2]) for event in answer.result(20)]
    kept = store.get(exchange.draft.id, "")
    assert kept is not None
    assert json.loads(bytes(kept.response)) == events[-1]["response"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == text
    assert [event["text"] for event in events if event["type"].endswith("text.done")] == [text]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]


def test_blocks_of_a_message_begin_and_end_even_if_there_is_no_room_for_them_at_once() -> None:
    run = make_run()
    events = MessageEvents(MessageAnswer(run), "id")
    begun = events.opening() + events.delta(0, Delta("", parts=(Thought("hm"),)))
    ours, clients = socket.socketpair()
    with closing(ours), closing(clients), ThreadPoolExecutor(1) as pool:
        make_narrow(ours)
        relay = Relay(ours, events, Heartbeat(0, time.monotonic()))
        num_filled = fill(ours)
        assert not relay(0, Delta("", parts=(Content("Hello"),)))
        sent = pool.submit(relay.send_rest)
        read_exactly(clients, num_filled)
        assert sent.result(20)
        size, chunk = clients.recv(2**16).split(b"\r\n", 1)
    run.choices[0].add(TokenBatch((), finish=FinishReason.STOP))
    ended = events.delta(0, Delta("", finish=FinishReason.STOP, parts=())) + events.closing()
    content = join_events(begun + chunk[: int(size, 16)] + ended)["content"]
    assert [block["type"] for block in content] == ["thinking", "text"]
    assert content[0]["thinking"] == "hm" and content[1]["text"] == "Hello"


def test_a_sign_of_life_is_sent_at_once_when_tokens_show_nothing_for_long() -> None:
    ours, clients = socket.socketpair()
    with closing(ours), closing(clients):
        relay = Relay(ours, ChunkStream(ChatAnswer).begin(make_run()), Heartbeat(1, time.monotonic() - 1))
        assert relay(0, Delta("", (1,)))
        assert clients.recv(100) == b"%X\r\n%b\r\n" % (len(PING), PING)
        assert not relay.send_rest()


def fill(sock: socket.socket) -> int:
    """Sends until there is no room; the number of bytes."""
    num_sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            num_sent += sock.send(b"x" * 100, socket.MSG_DONTWAIT)
    return num_sent


def read_exactly(sock: socket.socket, size: int) -> None:
    while size:
        size -= len(sock.recv(size))


def test_a_streams_own_thread_sends_only_its_first_and_last_words() -> None:
    with wired(lambda token: b"%d " % token) as (wire, pool):
        written, answer = pool.submit(wire.write), pool.submit(wire.read)
        wire.tokens.put(0, TokenBatch((0,)))
        for token in range(1, 50):
            wait_until(lambda: wire.num_written == 1 and wire.tokens._on_batch is not None)
            wire.tokens.put(0, TokenBatch((token,)))
        wire.tokens.put(0, TokenBatch((50,), finish=FinishReason.LENGTH))
        written.result(20)
        assert text_of(answer.result(20)) == "".join(f"{token} " for token in range(51))
        assert wire.num_written == 2, "the first, and the last with all that follows"


def test_nothing_is_sent_before_the_head_of_the_answer() -> None:
    """The first tokens make no whole character, so there is nothing to send with the head."""
    parts = "é".encode(), b" there"
    with wired(lambda token: parts[0][token : token + 1] if token < 2 else parts[1]) as (wire, pool):
        written, answer = pool.submit(wire.write), pool.submit(wire.read)
        for token in range(3):
            wire.tokens.put(0, TokenBatch((token,)))
            time.sleep(0.01)  # so that the stream's thread waits for the next token
        wire.tokens.put(0, TokenBatch((), finish=FinishReason.LENGTH))
        written.result(20)
        assert text_of(answer.result(20)) == "é there"


def test_a_stop_string_found_on_the_way_ends_the_stream() -> None:
    with wired(lambda token: b"abcdef"[token : token + 1], stops=["cd"]) as (wire, pool):
        written, answer = pool.submit(wire.write), pool.submit(wire.read)
        for token in range(6):
            wire.tokens.put(0, TokenBatch((token,)))
        written.result(20)
        assert text_of(answer.result(20)) == "ab"
        assert wire.closed == [FinishReason.STOP]


def test_signs_of_life_come_when_nothing_was_relayed_for_long() -> None:
    with wired(lambda token: b"x", heartbeat=0.2) as (wire, pool):
        written, answer = pool.submit(wire.write), pool.submit(wire.read)
        for _ in range(20):
            wire.tokens.put(0, TokenBatch((0,)))
            time.sleep(0.02)
        wait_until(lambda: wire.num_written >= 3)  # the first text, and two signs of life
        wire.tokens.put(0, TokenBatch((), finish=FinishReason.LENGTH))
        written.result(20)
        events = answer.result(20)
        assert text_of(events) == "x" * 20
        first_sign = events.index(": ping")
        assert first_sign > 10, "not while it flows"


def test_what_fails_on_the_way_is_told_in_the_stream_and_stops_nobody_else() -> None:
    def spell(token: int) -> bytes:
        if token == 13:
            raise RuntimeError("no such token")
        return b"x"

    with wired(spell) as (wire, pool):
        written, answer = pool.submit(wire.write), pool.submit(wire.read)
        for token in (1, 2, 13):
            if token != 1:
                wait_until(lambda: wire.tokens._on_batch is not None)
            wire.tokens.put(0, TokenBatch((token,)))
        written.result(20)
        *_, error, done = answer.result(20)
        assert (
            json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
            and done == "data: [DONE]"
        )


def test_a_client_that_has_gone_ends_the_stream_where_every_write_to_it_fails() -> None:
    with wired(lambda token: b"x" * 1000) as (wire, pool):
        written = pool.submit(wire.write)
        wire.tokens.put(0, TokenBatch((0,)))
        wait_until(lambda: wire.num_written == 1)
        wire.clients.close()
        wire.tokens.put(0, TokenBatch((0,)))
        with pytest.raises(BrokenPipeError):
            written.result(20)


def test_a_reader_that_is_not_woken_has_lent_its_things_and_gets_them_back() -> None:
    """The writer runs `carry` while the reader waits; the two threads never work at the same time."""
    stream = TokenStream(["0"], lambda *told: None)
    users: list[str] = []

    def carry(index: int, batch: TokenBatch) -> TokenBatch | None:
        users.append("in")
        time.sleep(0.0005)
        users.append("out")
        return batch if batch.finish is not None or batch.tokens[0] % 7 == 0 else None

    def write() -> None:
        for token in range(1, 200):
            stream.put(0, TokenBatch((token,)))
            time.sleep(0.0001)
        stream.put(0, TokenBatch((0,), finish=FinishReason.LENGTH))

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not stream.is_finished:
        seen.append(stream.get(20, carry)[1].tokens[0])
        users += ["mine", "mine"]
    writer.join()
    assert set(range(7, 200, 7)) <= set(seen) and seen == [*sorted(seen[:-1]), 0]
    assert "in" in users, "most were carried"
    assert {*zip(users[::2], users[1::2])} == {("in", "out"), ("mine", "mine")}, "nobody came in between"


def test_a_reader_that_comes_late_has_all_that_came_carried_and_is_woken_for_the_rest_alone() -> None:
    stream = TokenStream(["0"], lambda *told: None)
    carried: list[int] = []

    def carry(index: int, batch: TokenBatch) -> TokenBatch | None:
        carried.extend(batch.tokens)
        return None if batch.finish is None else batch

    for token in range(3):
        stream.put(0, TokenBatch((token,)))
    stream.put(0, TokenBatch((3,), finish=FinishReason.LENGTH))
    assert stream.get(0, carry) == (0, TokenBatch((3,), finish=FinishReason.LENGTH))
    assert carried == [0, 1, 2, 3]
