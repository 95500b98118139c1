"""Where a request ends, whatever pieces it arrives in, and that gunicorn's parser finds the same end."""

from __future__ import annotations

from itertools import pairwise

import pytest
from gunicorn.config import Config
from gunicorn.http.errors import LimitRequestHeaders, NoMoreData, ParseException
from gunicorn.http.parser import RequestParser
from hypothesis import given
from hypothesis import strategies as st

from levserve.errors import BadRequest, BodyTooLarge, Unavailable
from levserve.wire.framing import FRAMING_BYTES, MAX_HEAD_BYTES, RawReader, RawRequest, RequestBuffer

MAX_BODY = 200
POST = b"POST /x HTTP/1.1\r\nHost: h\r\n"

bodies = st.binary(max_size=MAX_BODY)


def counted(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, size: int, trailer: bytes = b"") -> bytes:
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(b"%x;n=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return POST + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n" + trailer + b"\r\n"


def joined(sent: bytes) -> bytes:
    """The request as it is handed on: without an empty line before it, and with its chunks as one."""
    head, end, rest = sent.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return head + end + rest
    body = b""
    while (size := int(rest.partition(b"\r\n")[0].partition(b";")[0], 16)) > 0:
        rest = rest.partition(b"\r\n")[2]
        body, rest = body + rest[:size], rest[size + 2 :]
    return head + end + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + rest


requests = st.one_of(
    bodies.map(counted),
    st.builds(chunked, bodies, st.integers(1, 60), st.sampled_from([b"", b"X-Sum: 1\r\n"])),
    st.sampled_from([b"GET / HTTP/1.1\r\n\r\n", b"\r\nGET /after-a-blank-line HTTP/1.0\r\nA: b\r\n\r\n"]),
)


def feed(pieces: list[bytes]) -> tuple[list[RawRequest], RequestBuffer]:
    buffer = RequestBuffer(MAX_BODY)
    found = []
    for piece in pieces:
        buffer.feed(piece)
        while (request := buffer.take()) is not None:
            found.append(request)
    return found, buffer


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(st.lists(requests, min_size=1, max_size=4), st.lists(st.integers(0, 10**6), max_size=12))
def test_requests_are_found_whole_however_they_are_cut_up(sent: list[bytes], places: list[int]) -> None:
    found, buffer = feed(cut(b"".join(sent), places))
    assert [request.head + request.body for request in found] == [joined(one) for one in sent]
    assert all(request.is_whole for request in found) and len(buffer) == 0


@given(
    st.binary(min_size=MAX_BODY + 1, max_size=4 * MAX_BODY),
    st.lists(st.integers(0, 10**6), max_size=12),
    bodies,
)
def test_a_large_upload_goes_to_a_file_and_the_next_request_is_found(
    body: bytes, places: list[int], next_body: bytes
) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    buffer = RequestBuffer(MAX_BODY, 4 * MAX_BODY)
    found = []
    for piece in cut(head + body + counted(next_body), places):
        buffer.feed(piece)
        while (request := buffer.take()) is not None:
            found.append(request)
        assert len(buffer) <= len(head) + len(counted(next_body))
    upload, other = found
    assert upload.head == head and upload.is_whole and other.head + other.body == counted(next_body)
    parser = RequestParser(Config(), (), ("127.0.0.1", 1))
    parser.unreader = RawReader(upload)
    assert next(parser).body.read() == body
    upload.close()
    assert len(buffer) == 0 and buffer.upload_bytes == 0


@pytest.mark.parametrize(
    ("head", "size"),
    [(b"POST /v1/files HTTP/1.1", 4 * MAX_BODY + 1), (b"POST /v1/other HTTP/1.1", MAX_BODY + 1)],
)
def test_only_uploads_may_be_large_and_they_have_a_limit_too(head: bytes, size: int) -> None:
    buffer = RequestBuffer(MAX_BODY, 4 * MAX_BODY)
    buffer.feed(head + b"\r\nContent-Length: %d\r\n\r\n" % size)
    request = buffer.take()
    assert request is not None and isinstance(request.shortfall, BodyTooLarge)


def test_an_upload_that_cannot_be_kept_is_refused() -> None:
    head = b"POST /v1/files HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (2 * MAX_BODY)
    buffer = RequestBuffer(MAX_BODY, 4 * MAX_BODY, "/nowhere")
    buffer.feed(head)
    request = buffer.take()
    assert request is not None and isinstance(request.shortfall, Unavailable)
    buffer = RequestBuffer(MAX_BODY, 4 * MAX_BODY)
    buffer.feed(head + b"x")
    assert buffer.take() is None and buffer.upload_bytes == 2 * MAX_BODY
    buffer.clear()
    assert buffer.upload_bytes == 0


@given(bodies, st.integers(0, 60))
def test_gunicorns_parser_reads_to_the_same_end(body: bytes, size: int) -> None:
    ((request,), _) = feed([chunked(body, size) if size else counted(body)])
    parser = RequestParser(Config(), (), ("127.0.0.1", 1))
    parser.unreader = RawReader(request)
    assert next(parser).body.read() == body
    assert parser.unreader.read() == b""


LINES = [
    *(
        b"GET / HTTP/1.1\r\n",
        POST,
        b"\r\n",
        b"\n",
        b"hello",
        b"5\r\nhello\r\n",
        b"05 ;\r\nhello\r\n",
        b"0\r\n",
    ),
    *(b"Content-Length: 5\r\n", b"Content-Length : 3\r\n", b" Content-Length: 2\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity, chunked\r\n"),
]


@given(st.lists(st.one_of(st.sampled_from(LINES), st.binary(max_size=20)), max_size=12))
def test_what_is_taken_for_whole_is_refused_by_the_parser_or_read_to_its_last_byte(
    pieces: list[bytes],
) -> None:
    """So no byte of one request can be taken for the beginning of another."""
    found, _ = feed(pieces)
    for request in found:
        parser = RequestParser(Config(), (), ("127.0.0.1", 1))
        parser.unreader = RawReader(request)
        try:
            next(parser).body.read()
        except (ParseException, NoMoreData, BodyTooLarge):
            continue
        assert parser.unreader.read() == b"" or not request.is_whole


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: five\r\n",
        b"Content-Length:\r\n",
        b"Content-Length: %s\r\n" % (b"9" * 40),
        b"Transfer-Encoding: wind\r\n",
        b"Transfer-Encoding: chunked, gzip\r\n",
        b"Expect: a miracle\r\nContent-Length: 5\r\n",
    ],
)
def test_a_length_that_is_in_doubt_is_handed_over_at_once_and_ends_the_connection(fields: bytes) -> None:
    ((request,), buffer) = feed([POST + fields + b"\r\n"])
    assert not request.is_whole and len(buffer) == 0


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\nHost: x\n\n", b"GET / HTTP/1.1\r\nA: b\n"]
)
def test_what_can_never_become_a_head_is_not_waited_for(sent: bytes) -> None:
    ((request,), _) = feed([sent])
    with pytest.raises((ParseException, NoMoreData)):
        parser = RequestParser(Config(), (), ("127.0.0.1", 1))
        parser.unreader = RawReader(request)
        next(parser)


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Content-Length: %d\r\n\r\n" % (MAX_BODY + 1),
        chunked(b"x" * (MAX_BODY + 1), 50),
    ],
)
def test_a_body_over_the_limit_is_handed_over_before_it_is_here_and_says_so_to_its_reader(
    sent: bytes,
) -> None:
    found, _ = feed([sent])
    assert not found[0].is_whole
    reader = RawReader(found[0])
    with pytest.raises(BodyTooLarge, match=f"{MAX_BODY} bytes"):
        while reader.read():
            pass


def test_a_body_of_exactly_the_limit_is_taken() -> None:
    for sent in (counted(b"x" * MAX_BODY), chunked(b"x" * MAX_BODY, 7)):
        ((request,), _) = feed([sent])
        assert request.is_whole


@pytest.mark.parametrize("extension", [b"", b";" + b"a" * 5000])
def test_chunks_that_are_mostly_framing_are_given_up(extension: bytes) -> None:
    buffer = RequestBuffer(2**20)
    buffer.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(2**8):
        buffer.feed(b"1%b\r\nx\r\n" % extension * 2**8)
        if (request := buffer.take()) is not None:
            break
    assert request is not None and not request.is_whole and isinstance(request.shortfall, BadRequest)
    size, _, rest = request.body.partition(b"\r\n")
    assert rest.startswith(b"x" * int(size, 16) + b"\r\n1") and int(size, 16) > 30


def test_trailers_without_end_are_given_up() -> None:
    found, _ = feed(
        [
            POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
            *[b"X: %s\r\n" % (b"a" * 4000)] * (FRAMING_BYTES // 4000 + 1),
        ]
    )
    assert not found[0].is_whole


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_head_over_the_limit_is_given_up(end: bytes) -> None:
    found, _ = feed([b"GET / HTTP/1.1\r\nX: ", b"a" * MAX_HEAD_BYTES, end])
    reader = RawReader(found[0])
    with pytest.raises(LimitRequestHeaders):
        while reader.read():
            pass


def test_an_invitation_is_wanted_once_and_not_by_a_client_that_has_begun() -> None:
    asking = POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    _, buffer = feed([asking])
    assert [buffer.pop_expects_continue(), buffer.pop_expects_continue()] == [True, False]
    for other in (asking + b"he", asking.replace(b"1.1", b"1.0")):
        _, buffer = feed([other])
        assert not buffer.pop_expects_continue()


def test_the_path_is_what_stands_before_the_query() -> None:
    ((request,), _) = feed([b"GET /metrics?all=1 HTTP/1.1\r\n\r\n"])
    assert request.path == b"/metrics"
    ((request,), _) = feed([b"NONSENSE\r\n\r\n"])
    assert request.path == b""
