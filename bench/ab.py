#!/usr/bin/env python3
"""Asks two or more servers the same prompts with the same seeds, and shows where their answers and times differ.

Standard library only. `kinds.py` knows the API of each kind of server, `difference.py` compares two
answers. Questions are asked one at a time, so that servers on one machine do not disturb each other;
servers take turns at going first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ab_options import Server, make_asks, parse
from ab_report import Round, make_document, make_sides, make_table
from difference import Answer, Difference, find_difference
from figures import tokens_per_gap
from http_client import TRANSPORT_ERRORS, EventStream, WrongAnswer, connect, first_model, send
from kinds import Ask, Kind, Piece

WARM_UP = Ask("Hello", max_tokens=2, logprobs=False)


def ask_server(server: Server, ask: Ask, *, is_streamed: bool) -> Answer:
    """Asks one server. What the server does wrong is not raised, but is the answer's `failure`."""
    kind = server.kind
    path = kind.stream_path if is_streamed else kind.whole_path
    body = json.dumps(kind.spell(ask, server.model, is_streamed)).encode()
    began = time.perf_counter()
    pieces: list[tuple[float, Piece]] = []
    failure = None
    try:
        with contextlib.closing(connect(server.address)) as connection:
            with send(connection, server.address, path, body) as response:
                if response.status != 200:
                    raise WrongAnswer(f"http_{response.status}", response.read(2_000))
                for event in read_events(response, is_streamed):
                    pieces.append((time.perf_counter() - began, read_piece(kind, event)))
    except (WrongAnswer, *TRANSPORT_ERRORS) as error:
        prefix = f"{error.kind}: " if isinstance(error, WrongAnswer) else ""
        failure = prefix + (str(error) or repr(error))
    if failure is None and not any(piece.finish for _, piece in pieces):
        failure = "truncated: the answer has no finish reason"
    return join(pieces, time.perf_counter() - began, failure, is_streamed=is_streamed)


def read_events(response: Any, is_streamed: bool) -> Iterator[bytes]:
    """The data of each event, without OpenAI's [DONE]; a whole answer is one event."""
    if not is_streamed:
        yield response.read()
        return
    events = EventStream()
    while piece := response.read1():
        for event in events.feed(piece):
            if event != b"[DONE]":
                yield event


def read_piece(kind: Kind, event: bytes) -> Piece:
    try:
        answer = json.loads(event)
        if answer.get("error"):
            raise WrongAnswer("error_event", json.dumps(answer["error"]))
        return kind.read(answer)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WrongAnswer("malformed", f"not what {kind.name} answers ({error!r}): {event!r}") from error


def join(
    pieces: Sequence[tuple[float, Piece]], total_seconds: float, failure: str | None, *, is_streamed: bool
) -> Answer:
    tokens = tuple(token for _, piece in pieces for token in piece.tokens)
    counts = [piece.completion_tokens for _, piece in pieces if piece.completion_tokens is not None]
    prompts = [piece.prompt_tokens for _, piece in pieces if piece.prompt_tokens is not None]
    deltas = [(at, len(piece.text)) for at, piece in pieces if piece.text]
    completion_tokens = counts[-1] if counts else len(tokens) or None
    return Answer(
        text="".join(piece.text for _, piece in pieces),
        tokens=tokens,
        finish=next((piece.finish for _, piece in pieces if piece.finish), None),
        prompt_tokens=prompts[-1] if prompts else None,
        completion_tokens=completion_tokens,
        ttft_seconds=deltas[0][0] if deltas and is_streamed else None,
        itl_seconds=mean_gap(deltas, completion_tokens or len(deltas)) if is_streamed else None,
        total_seconds=total_seconds,
        failure=failure,
    )


def mean_gap(deltas: Sequence[tuple[float, int]], completion_tokens: int) -> float | None:
    """Seconds between tokens after the first delta."""
    if len(deltas) < 2:
        return None
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(deltas)]
    return statistics.fmean(gaps) / tokens_per_gap(completion_tokens, [chars for _, chars in deltas])


def ask_all(servers: Sequence[Server], asks: Sequence[Ask], *, is_streamed: bool) -> Iterator[Round]:
    for number, ask in enumerate(asks):
        turn = number % len(servers)
        order = [*range(turn, len(servers)), *range(turn)]
        answers = {place: ask_server(servers[place], ask, is_streamed=is_streamed) for place in order}
        ordered = [answers[place] for place in range(len(servers))]
        yield Round(ask, ordered, compare(ordered))


def compare(answers: Sequence[Answer]) -> list[Difference | None]:
    first, *others = answers
    differences: list[Difference | None] = [None]
    for other in others:
        has_failed = first.failure is not None or other.failure is not None
        differences.append(None if has_failed else find_difference(first, other))
    return differences


def identify(server: Server) -> Server:
    """The server with the name of its model filled in, if its requests must have one."""
    if server.model or not server.kind.needs_model:
        return server
    try:
        model, _ = first_model(server.address)
    except ValueError as error:
        raise SystemExit(f"ab.py: {server.name}: {error}") from error
    return Server(server.name, server.kind, server.address, model)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv, (__doc__ or "").partition("\n")[0])
    servers = [identify(server) for server in options.servers]
    rounds: list[Round] = []
    is_interrupted = False
    try:
        for server in servers:
            ask_server(server, WARM_UP, is_streamed=options.stream)
        for each in ask_all(servers, make_asks(options), is_streamed=options.stream):
            rounds.append(each)
    except KeyboardInterrupt:
        is_interrupted = True
    document = make_document(servers, rounds)
    table = make_table(servers, document["summary"])
    parts = [table, make_sides(servers, rounds, options.width), "", *document["notes"]]
    print("\n".join(parts).rstrip(), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        print(json.dumps(document))
    elif options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if is_interrupted:
        return 130
    return int(any(one["failed"] for one in document["summary"].values()))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
