"""A device thread whose tokens one can work out by hand, with the toy vocabulary `<pad> <s> </s> t3 t4 ...`.

Greedy, token k is followed by k + 1; at any temperature above 0 by k + 1 + seed % 5. After k, the token k + 1
has the log-probability -0.5, k + 2 has -1.5, and the others are impossible. The hidden state of k is 1 in
place k % 4 of four and 0 in the others. A prompt's scores come three at a time, before its first token. Some
tokens in a prompt are orders: with t3 the request gets one token and the rest after the drain has begun; with
t4 it gets none and waits forever; t5 kills the device; with t6 it gets one token and waits forever; each t7
counts as found in the prefix cache; with t8 the request is lost and never answered. A parrot instead repeats
the last message of a chat, or the prompt, byte by byte.

Run as a program, this is a whole server around that thread, which prints each of its events as a JSON line on
stdout; or, with `--fork-by`, a process from which such servers are forked.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
import time
from array import array
from pathlib import Path

import tokenizers

from levserve import cli
from levserve.engine.messages import Cancel, Drain, Stop, Submit
from levserve.engine.served_model import ServedModel
from levserve.errors import ConfigError
from levserve.models.entry import Resident
from levserve.models.registry import Registry
from levserve.observe.metrics import Metrics
from levserve.schedule.request import FinishReason, GenerationRequest, PooledHidden, TokenBatch, TokenLogprob
from levserve.settings.settings import Settings
from levserve.text.grammar import Grammars
from levserve.text.reasoning import find_reasoning
from levserve.text.tokenizer import Tokenizer
from levserve.text.tools.model_tools import ModelTools
from levserve.text.vocabulary import Vocabulary
from tests.forks import wait_to_be_forked

GOLDEN = Path(__file__).parent / "golden" / "llama"
WAIT_FOR_DRAIN, WAIT, DIE, WAIT_AFTER_ONE, CACHED, LOSE = 3, 4, 5, 6, 7, 8
MAX_SEQ_LEN = 64
HIDDEN_SIZE = 4
SCORES_PER_STEP = 3
PARROT_EOS = 0
PARROT_SECONDS = 0.002
MODEL = "toy"
# The assistant's turn begins with t9, so a greedy answer is t10 t11 t12 ...
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}t9{% endif %}"

THINKING_TEMPLATE = (
    "{% for message in messages %}{% if message.reasoning_content %}({{ message.reasoning_content }})"
    "{% endif %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
)


def load_toy_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return Tokenizer(Vocabulary(backend, eos_ids=frozenset((2,)), chat_template=template, **special))


def serve_toy(
    name: str, max_seq_len: int, tokenizer: Tokenizer | None = None, metrics: Metrics | None = None
) -> ServedModel:
    tokenizer = tokenizer or load_toy_tokenizer()
    grammars = Grammars(tokenizer, tokenizer.vocab_size, (metrics or Metrics()).note_grammar)
    tools, reasoning = ModelTools(tokenizer), find_reasoning(tokenizer)
    return ServedModel(
        name, tokenizer, max_seq_len, HIDDEN_SIZE, 1700000000, grammars, tools, reasoning=reasoning
    )


def load_byte_tokenizer(template: str = "{{ messages[-1].content }}") -> Tokenizer:
    """Each byte is a token; the chat template keeps only the last message."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"</s>": PARROT_EOS} | {character: place + 1 for place, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(
        Vocabulary(backend, eos_ids=frozenset((PARROT_EOS,)), chat_template=template, eos_token="</s>")
    )


class Row:
    def __init__(self, submit: Submit, vocab_size: int, obeys: bool) -> None:
        self.request: GenerationRequest = submit.request
        self._stream = submit.stream
        self._index = submit.index
        self._vocab_size = vocab_size
        self._orders = frozenset(submit.request.prompt) if obeys else frozenset[int]()
        self._last = submit.request.prompt[-1]
        self._count = 0
        self._scores = self._score_prompt()

    def is_told(self, order: int) -> bool:
        return order in self._orders

    @property
    def is_scoring(self) -> bool:
        return len(self._scores) > SCORES_PER_STEP

    def is_held(self, is_draining: bool) -> bool:
        waits_after_one = self.is_told(WAIT_AFTER_ONE) or (self.is_told(WAIT_FOR_DRAIN) and not is_draining)
        return self.is_told(WAIT) or (waits_after_one and self._count == 1)

    def step(self) -> FinishReason | None:
        """Scores a part of the prompt or, once it is scored, adds one token."""
        if self.is_scoring:
            self._put(TokenBatch((), prompt_logprobs=self._take_scores()))
            return None
        if self.request.max_tokens == 0:
            return self.end(FinishReason.LENGTH)
        sampling = self.request.sampling
        previous = self._last
        self._last = self._follow(previous)
        if self._last in self.request.stop_ids and self._count >= sampling.min_tokens:
            return self.end(FinishReason.STOP)
        self._count += 1
        finish = FinishReason.LENGTH if self._count == self.request.max_tokens else None
        logprobs = () if sampling.num_logprobs is None else (self._logprob(previous, self._last),)
        self._put(TokenBatch((self._last,), logprobs, finish, self._num_cached(), self._take_scores()))
        return finish

    def end(self, finish: FinishReason) -> FinishReason:
        hidden = self._pool() if self.request.wants_hidden else None
        self._put(TokenBatch((), (), finish, self._num_cached(), self._take_scores(), hidden))
        return finish

    def _follow(self, token: int) -> int:
        sampling = self.request.sampling
        return (token + 1 + (sampling.seed % 5 if sampling.temperature else 0)) % self._vocab_size

    def _num_cached(self) -> int:
        return self.request.prompt.count(CACHED)

    def _score_prompt(self) -> tuple[TokenLogprob, ...]:
        prompt, first = self.request.prompt, self.request.score_from
        if first is None:
            return ()
        assert 1 <= first < len(prompt)
        return tuple(self._logprob(*pair) for pair in zip(prompt[first - 1 :], prompt[first:]))

    def _take_scores(self) -> tuple[TokenLogprob, ...]:
        taken, self._scores = self._scores[:SCORES_PER_STEP], self._scores[SCORES_PER_STEP:]
        return taken

    def _logprob(self, previous: int, token: int) -> TokenLogprob:
        values = {1: -0.5, 2: -1.5}
        count = self.request.sampling.num_logprobs or 0
        top = tuple(
            ((previous + step) % self._vocab_size, values.get(step, -math.inf))
            for step in range(1, count + 1)
        )
        return TokenLogprob(values.get((token - previous) % self._vocab_size, -math.inf), top)

    def _pool(self) -> PooledHidden:
        prompt = self.request.prompt
        states = [[float(token % HIDDEN_SIZE == place) for place in range(HIDDEN_SIZE)] for token in prompt]
        return PooledHidden(
            array("f", [sum(column) / len(prompt) for column in zip(*states)]), array("f", states[-1])
        )

    def _put(self, batch: TokenBatch) -> None:
        self._stream.put(self._index, batch)


class ParrotRow(Row):
    """Repeats its prompt at a pace that one can watch; each token is as likely as a greedy one of `Row`."""

    def _follow(self, token: int) -> int:
        time.sleep(PARROT_SECONDS)
        prompt = self.request.prompt
        return prompt[self._count] if self._count < len(prompt) else PARROT_EOS

    def _logprob(self, previous: int, token: int) -> TokenLogprob:
        return super()._logprob(token - 1, token)


class FakeDevice(threading.Thread):
    """Answers an engine's inbox until `Stop`. `events` receives what it does, as (event, request id) pairs.

    `requests` holds every request that it was given. Unless it `obeys`, it ignores the orders in prompts.
    """

    row_kind: type[Row] = Row
    max_seq_len = MAX_SEQ_LEN

    def __init__(self, registry: Registry, tokenizer: Tokenizer | None = None, *, obeys: bool = True) -> None:
        super().__init__(name="levserve-device", daemon=True)
        self.events: queue.Queue[tuple[str, str]] = queue.Queue()
        self.requests: list[GenerationRequest] = []
        engine = self._engine = registry.engine
        self._obeys = obeys
        self._tokenizer = tokenizer or load_toy_tokenizer()
        self._rows: dict[str, Row] = {}
        self._drain_deadline: float | None = None
        engine.metrics.kv_pages_total.set(16)
        engine.metrics.model_info.labels(MODEL, 4, 16).set(1)
        registry.publish(Resident(model=serve_toy(MODEL, self.max_seq_len, self._tokenizer, engine.metrics)))

    def tell(self, event: str, request_id: str = "") -> None:
        self.events.put((event, request_id))

    def run(self) -> None:
        while self._take_messages():
            self._engine.beat()
            now = time.monotonic()
            for request_id, row in list(self._rows.items()):
                if now >= (row.request.deadline or now + 1):
                    self._end(request_id, FinishReason.DEADLINE)
                elif self._drain_deadline is not None and now >= self._drain_deadline:
                    self._end(request_id, FinishReason.SHUTDOWN)
                elif row.is_told(DIE):
                    self._die()
                elif (
                    self._is_shared_prompt_scored(row)
                    and not row.is_held(self._drain_deadline is not None)
                    and row.step()
                ):
                    self._forget(request_id)

    def _is_shared_prompt_scored(self, row: Row) -> bool:
        """Whether the sequence whose prompt this one shares is scored: it comes first, as in reality."""
        first = self._rows.get(row.request.shares_prompt_of or "")
        return first is None or not first.is_scoring

    def _take_messages(self) -> bool:
        is_idle = all(row.is_held(self._drain_deadline is not None) for row in self._rows.values())
        try:
            message = self._engine.inbox.get(block=is_idle, timeout=0.01 if self._rows else None)
        except queue.Empty:
            return True
        match message:
            case Submit(request):
                self.requests.append(request)
                row = self.row_kind(message, self._tokenizer.vocab_size, self._obeys)
                message.stream.note_placed(time.monotonic())
                if not row.is_told(LOSE):
                    self._rows[request.request_id] = row
                self.tell("submit", request.request_id)
            case Cancel(request_id) if request_id in self._rows:
                self.tell("cancel", request_id)
                self._end(request_id, FinishReason.CANCELLED)
            case Drain(deadline):
                self._drain_deadline = min(deadline, self._drain_deadline or deadline)
                self.tell("drain")
            case Stop():
                self.tell("stop")
                return False
        return True

    def _end(self, request_id: str, finish: FinishReason) -> None:
        self._rows[request_id].end(finish)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._rows[request_id]
        self.tell("end", request_id)

    def _die(self) -> None:
        for request_id in list(self._rows):
            self._end(request_id, FinishReason.FAILED)
        self._engine.fail()
        time.sleep(1)  # for writers to send their last events, as the real device thread does
        os._exit(70)


class TellingDevice(FakeDevice):
    def tell(self, event: str, request_id: str = "") -> None:
        print(json.dumps([event, request_id]), flush=True)


class Parrot(TellingDevice):
    row_kind = ParrotRow
    max_seq_len = 4096

    def __init__(self, registry: Registry, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(registry, tokenizer or load_byte_tokenizer(), obeys=False)


class ThinkingParrot(Parrot):
    """A parrot that can be told to think: its answer to `<think>a</think>b` is the thought a and the text b."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry, load_byte_tokenizer(THINKING_TEMPLATE))


class QuietThinkingParrot(ThinkingParrot):
    """One for tests in the same process, whose stdout it leaves alone."""

    def tell(self, event: str, request_id: str = "") -> None:
        pass


def start_fake_device(settings: Settings, registry: Registry) -> threading.Thread:
    """Replaces the function that starts the real device thread. The served name may be an order: for a start
    that fails, one that never ends, a template of a megabyte, or a parrot."""
    match settings.main_name:
        case "broken":
            raise ConfigError("the model is broken")
        case "missing":
            thread = threading.Thread(target=_find_nothing)
        case "endless":
            thread = threading.Thread(target=threading.Event().wait, daemon=True)
        case "talkative":
            thread = TellingDevice(registry, load_toy_tokenizer(TEMPLATE + "{#" + "x" * 1_000_000 + "#}"))
        case "parrot":
            thread = Parrot(registry)
        case "thinking-parrot":
            thread = ThinkingParrot(registry)
        case _:
            thread = TellingDevice(registry)
    thread.start()
    return thread


def _find_nothing() -> None:
    """Does what the real device thread does after a `StartupError`."""
    print("levserve: error: the model is missing", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    cli._start_device = start_fake_device
    flags = sys.argv[1:]
    if flags[0] == "--fork-by":
        flags = wait_to_be_forked(int(flags[1]))
    sys.exit(cli.main(["--model", str(GOLDEN), *flags]))
