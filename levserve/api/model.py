"""A model that is open: generate, chat, stream, score and embed, from any thread or from an event loop.

The engine, the scheduler, the seeds, the checks and the errors (`levserve.errors`) are the server's, and so
the text is the same as the server's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from levserve.api.fields import ChatFields, EmbedFields, PromptsBody, ScoreFields, TextFields, make_body
from levserve.api.items import Items, Prompt, read_items, read_pair, read_prompt, read_prompts
from levserve.api.jobs import Jobs
from levserve.api.progress import show_progress
from levserve.api.results import Piece, Result, Score
from levserve.api.stream import TextStream, stream_async
from levserve.api.window import Outcome, run_jobs, run_jobs_async
from levserve.api.work import Job, Runtime
from levserve.errors import BadRequest, StartupError, Unavailable
from levserve.models.entry import SwappedWeights
from levserve.models.registry import Registry
from levserve.request.schema import ChatBody, CompletionBody
from levserve.settings.settings import Settings
from levserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")

MakeItem = Callable[[int, Any], Job[T]]
"""Makes the job of an item from its number and the item."""
Message = Mapping[str, Any]
"""OpenAI's: a role and a content."""
NUM_TOKENIZING = 2
"""Threads that make jobs for event loops."""


class Model:
    """Made by `levserve.open`. Leaving its `with` block, or `close`, ends all work and frees the memory.

    Every method may be called from any thread. Lists may be of any length: as many prompts run at a time as
    the device takes, and results come in the order of the list. A wrong argument raises `BadRequest`,
    and a prompt that fails ends the whole call with an error that begins with its place in the list. A model
    that is closed, or that was opened before this process was forked, raises `Unavailable`.
    """

    def __init__(
        self, registry: Registry, settings: Settings, on_close: Callable[[], None] | None = None
    ) -> None:
        self._engine = registry.engine
        self._model = registry.default
        self._runtime = Runtime(self._engine, self._model)
        self._jobs = Jobs(self._model, settings)
        with registry.borrow(loads=False) as handle:
            self._reloader = handle.resident.reloader
        self._on_close = on_close
        self._closing = threading.Lock()
        self._executor = ThreadPoolExecutor(NUM_TOKENIZING, "levserve-api")

    def __repr__(self) -> str:
        return f"<levserve model {self.name}{', closed' if self._runtime.is_closed else ''}>"

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self._model.max_seq_len

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        progress: bool | None = None,
        **fields: Unpack[TextFields],
    ) -> list[Result]:
        """Continues one prompt or many; a result for each, in order.

        The fields and their defaults are those of /v1/completions. `progress` shows a bar, by default for
        long lists in a terminal.
        """
        items = read_prompts(prompts, "prompts")
        return self._run(items, self._text_maker(fields, PromptsBody), fields, progress)

    def chat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> Result:
        """Answers a conversation. The fields and their defaults are those of /v1/chat/completions."""
        (result,) = self._run(Items([messages]), self._chat_maker(fields))
        return result

    def chat_many(
        self,
        conversations: Iterable[Sequence[Message]],
        *,
        progress: bool | None = None,
        **fields: Unpack[ChatFields],
    ) -> list[Result]:
        """Answers each of many conversations, in order."""
        items = read_items(conversations, "conversations")
        return self._run(items, self._chat_maker(fields), fields, progress)

    def stream(self, prompt: Prompt, **fields: Unpack[TextFields]) -> TextStream:
        """The pieces of a continuation as they come; closing the iterator, or dropping it, ends the work."""
        return self._stream(self._text_maker(fields, CompletionBody), _single(prompt))

    def stream_chat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> TextStream:
        """The pieces of an answer to a conversation as they come."""
        return self._stream(self._chat_maker(fields), messages)

    def score(
        self,
        pairs: Iterable[tuple[Prompt, Prompt]],
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        timeout: float | None = None,
        progress: bool | None = None,
    ) -> list[Score]:
        """How likely each continuation is after its prompt, as /loglikelihood computes it.

        A pair is two texts, which are tokenized as lm-evaluation-harness does, or two lists of token ids.
        """
        given = {"truncate_prompt_tokens": truncate_prompt_tokens, "priority": priority, "timeout": timeout}
        fields = make_body(ScoreFields, {}, given)

        def make(number: int, pair: object) -> Job[Score]:
            return self._jobs.score(read_pair(pair), fields, number)

        return self._run(read_items(pairs, "pairs"), make, given, progress)

    def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        pooling: str = "mean",
        add_special_tokens: bool = True,
        priority: int = 0,
        timeout: float | None = None,
        progress: bool | None = None,
    ) -> npt.NDArray[np.float32]:
        """One row of length 1 for each text, as /v1/embeddings gives them."""
        given = {
            "pooling": pooling,
            "add_special_tokens": add_special_tokens,
            "priority": priority,
            "timeout": timeout,
        }
        fields = make_body(EmbedFields, {}, given)

        def make(number: int, text: object) -> Job[npt.NDArray[np.float32]]:
            return self._jobs.embed(read_prompt(text, "texts"), fields)

        vectors = self._run(read_prompts(texts, "texts"), make, given, progress)
        import numpy as np

        return np.stack(vectors) if vectors else np.empty((0, self._model.hidden_size), np.float32)

    async def agenerate(
        self, prompts: Prompt | Iterable[Prompt], **fields: Unpack[TextFields]
    ) -> list[Result]:
        """`generate` for an event loop. Cancelling the task ends the work."""
        items = read_prompts(prompts, "prompts")
        return await self._arun(items, self._text_maker(fields, PromptsBody), fields)

    async def achat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> Result:
        """`chat` for an event loop."""
        (result,) = await self._arun(Items([messages]), self._chat_maker(fields))
        return result

    def astream(self, prompt: Prompt, **fields: Unpack[TextFields]) -> AsyncIterator[Piece]:
        """`stream` for an event loop; the work begins with the first piece that is asked for."""
        return self._astream(self._text_maker(fields, CompletionBody), _single(prompt))

    def astream_chat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> AsyncIterator[Piece]:
        """`stream_chat` for an event loop."""
        return self._astream(self._chat_maker(fields), messages)

    def load_weights(self, arrays: Mapping[str, Any]) -> SwappedWeights:
        """Replaces the weights with these jax or NumPy arrays, and returns how long it took.

        The names and shapes are those of a Hugging Face checkpoint of the model; a head that is tied to the
        embedding may be left out. Types, tied heads and quantization are handled as when a model is opened,
        and nothing is compiled. Running prompts finish with the old weights, later ones wait for the new
        weights, and nothing computed with the old ones stays in the prefix cache. The arrays are copied. For
        arrays that do not fit it raises `BadRequest` and keeps the old weights.
        """
        self._require_open()
        if not isinstance(arrays, Mapping):
            kind = type(arrays).__name__
            raise BadRequest(f"'arrays' has an array for each name, and is not a {kind}.", param="arrays")
        if self._reloader is None:
            raise BadRequest("The weights of this model cannot be replaced.")
        try:
            return self._reloader.load(arrays, self._runtime.queue.hold_back)
        except StartupError as error:
            raise BadRequest(f"{error}", param="arrays") from error
        except Unavailable as error:
            raise self._runtime.explain(error) from None

    def close(self) -> None:
        """Ends all work, frees the memory and joins the threads.

        Closing twice is harmless, and so is closing in a process that was forked.
        """
        if self._runtime.is_forked:
            return  # it is the parent's, and the locks may be held by threads that are not here
        with self._closing:
            if self._runtime.is_closed:
                return
            self._runtime.is_closed = True
        self._engine.begin_drain(0.0)
        self._runtime.queue.close()
        self._executor.shutdown()
        if self._on_close is not None:
            self._on_close()

    def __enter__(self) -> Model:
        self._runtime.require_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_open(self) -> None:
        self._runtime.require_open()
        try:
            self._engine.require_ready()
        except Unavailable as error:  # another thread may be closing the model
            raise self._runtime.explain(error) from None

    def _text_maker(self, fields: Mapping[str, Any], kind: type[CompletionBody]) -> MakeItem[Result]:
        def make(number: int, prompt: object) -> Job[Result]:
            own = {"model": self.name, "prompt": read_prompt(prompt, kind.prompt_param)}
            return self._jobs.generate(make_body(kind, own, fields), number)

        return make

    def _chat_maker(self, fields: Mapping[str, Any]) -> MakeItem[Result]:
        def make(number: int, messages: object) -> Job[Result]:
            own = {"model": self.name, "messages": messages}
            return self._jobs.generate(make_body(ChatBody, own, fields), number)

        return make

    def _stream(self, make: MakeItem[Result], item: object) -> TextStream:
        self._require_open()
        return TextStream(self._runtime, make(0, item))

    def _astream(self, make: MakeItem[Result], item: object) -> AsyncIterator[Piece]:
        self._require_open()
        return stream_async(self._runtime, functools.partial(make, 0, item), self._executor)

    def _run(
        self,
        items: Items,
        make: MakeItem[T],
        fields: Collection[str] = (),
        progress: bool | None = False,
    ) -> list[T]:
        """The result of each item, in order; an error tells the item's number unless a field is wrong."""
        self._require_open()
        found: dict[int, T] = {}
        jobs = _make_later(items, make)
        with show_progress(items.each, progress) as tick, closing(run_jobs(self._runtime, jobs)) as outcomes:
            for outcome in outcomes:
                found[outcome.number] = _result_of(outcome, items, fields)
                tick()
        return [found[number] for number in range(len(found))]

    async def _arun(self, items: Items, make: MakeItem[T], fields: Collection[str] = ()) -> list[T]:
        self._require_open()
        found: dict[int, T] = {}
        jobs = _make_later(items, make)
        async with aclosing(run_jobs_async(self._runtime, jobs, self._executor)) as outcomes:
            async for outcome in outcomes:
                found[outcome.number] = _result_of(outcome, items, fields)
        return [found[number] for number in range(len(found))]


def _make_later(items: Items, make: MakeItem[T]) -> Iterator[Callable[[], Job[T]]]:
    return (functools.partial(make, number, item) for number, item in enumerate(items.each))


def _result_of(outcome: Outcome[T], items: Items, fields: Collection[str]) -> T:
    if outcome.error is not None:
        items.name_in(outcome.error, outcome.number, fields)
    return outcome.get()


def _single(prompt: object) -> object:
    items = read_prompts(prompt, "prompt")
    if items.argument:
        raise BadRequest("A stream has one prompt: a text, or a list of token ids.", param="prompt")
    (single,) = items.each
    return single
