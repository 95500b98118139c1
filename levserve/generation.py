"""From a stream of tokens to pieces of text, on the HTTP thread that waits for them.

One `Choice` per sequence detokenizes, holds back what may still become a stop string or a whole character, counts tokens
and says how it ended. `generate` runs the choices of one HTTP request over its stream and closes it on every way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from levserve.engine.stream import TokenStream
from levserve.errors import DeadlineExceeded, ServeError, Unavailable
from levserve.schedule.request import FinishReason, TokenBatch, TokenLogprob
from levserve.text.detokenizer import Detokenizer
from levserve.text.stops import StopStrings


class ClientGone(ServeError):
    """The client hung up; nobody will read the answer."""

    status = 499


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained: text that may be shown, the tokens behind it, and on the last delta why it ended.

    `offsets` says for each token how many characters of the choice's text come before it. Text that is held back lags behind
    its tokens.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    offsets: tuple[int, ...] = ()


class Choice:
    """One sequence's way into text. Belongs to one HTTP thread."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self.num_tokens = 0
        self.num_cached = 0
        self.finish: FinishReason | None = None
        self._num_chars = 0

    def add(self, batch: TokenBatch) -> Delta:
        """Takes a batch; after a stop string was found, later batches add nothing."""
        if self.finish is not None:
            return Delta("")
        self.num_cached = max(self.num_cached, batch.num_cached)
        text = ""
        offsets = []
        for token in batch.tokens:  # one at a time: the token that completes a stop string is the last one counted
            offsets.append(self._num_chars)
            piece = self._detokenizer.add((token,))
            self._num_chars += len(piece)
            text += self._stops.add(piece)
            if self._stops.is_matched:
                self.finish = FinishReason.STOP
                break
        used = len(offsets)
        self.num_tokens += used
        if self.finish is None and batch.finish is not None:
            text += self._stops.add(self._detokenizer.flush()) + self._stops.flush()
            self.finish = FinishReason.STOP if self._stops.is_matched else self._end(batch.finish)
        return Delta(text, batch.tokens[:used], batch.logprobs[:used], self.finish, tuple(offsets))

    def _end(self, finish: FinishReason) -> FinishReason:
        """Turns an end that is nobody's answer into an error; a deadline with tokens ends with what it has."""
        match finish:
            case FinishReason.CANCELLED:
                raise ClientGone("The client closed the connection.")
            case FinishReason.SHUTDOWN:
                raise Unavailable("The server shut down before the request was done.", retry_after_seconds=10.0)
            case FinishReason.FAILED:
                raise ServeError("The device failed while the request was running.")
            case FinishReason.DEADLINE if self.num_tokens == 0:
                raise DeadlineExceeded("The request's time ran out before its first token.")
            case FinishReason.DEADLINE:
                return FinishReason.LENGTH
        return finish


def generate(stream: TokenStream, choices: Sequence[Choice]) -> Iterator[tuple[int, Delta]]:
    """Yields each choice's deltas as they come, with the choice's number, until all have ended."""
    try:
        while any(choice.finish is None for choice in choices):
            index, batch = stream.get()
            choice = choices[index]
            was_open = choice.finish is None
            delta = choice.add(batch)
            if was_open:
                yield index, delta
                if delta.finish is not None and batch.finish is None:
                    stream.close(index)  # a stop string: the device does not know yet
    finally:
        stream.close()
