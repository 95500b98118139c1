"""A model that is open: generate, chat, stream, score and embed, from any thread or from an event loop.

The engine, the scheduler, the seeds, the checks and the errors (`levserve.errors`) are the server's, and so
the text is the same as the server's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from levserve.api.fields import ChatFields, TextFields, make_body
from levserve.api.jobs import Jobs, Tokens
from levserve.api.progress import show_progress
from levserve.api.results import Piece, Result, Score
from levserve.api.stream import TextStream, stream_async
from levserve.api.window import MakeJob, run_jobs, run_jobs_async
from levserve.api.work import Job, Runtime
from levserve.errors import BadRequest, StartupError, Unavailable
from levserve.models.entry import SwappedWeights
from levserve.models.registry import Registry
from levserve.request.pooling import POOLINGS
from levserve.request.schema import ChatBody, CompletionBody
from levserve.settings.settings import Settings
from levserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")

Prompt = str | Tokens
"""A text, or the ids of its tokens."""
Message = Mapping[str, Any]
"""OpenAI's: a role and a content."""
NUM_TOKENIZING = 2
"""Threads that make jobs for event loops."""


class Model:
    """Made by `levserve.open`. Leaving its `with` block, or `close`, ends all work and frees the memory.

    Every method may be called from any thread. Lists may be of any length: as many prompts run at a time as
    the device takes, and results come in the order of the list. A wrong argument raises `BadRequest`,
    and a prompt that fails ends the whole call.
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
        self._is_closed = False
        self._executor = ThreadPoolExecutor(NUM_TOKENIZING, "levserve-api")

    def __repr__(self) -> str:
        return f"<levserve model {self.name}{', closed' if self._is_closed else ''}>"

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
        return self._run(self._text_jobs(prompts, fields), prompts, progress)

    def chat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> Result:
        """Answers a conversation. The fields and their defaults are those of /v1/chat/completions."""
        (result,) = self._run([self._chat_job(messages, fields)], (), False)
        return result

    def chat_many(
        self,
        conversations: Iterable[Sequence[Message]],
        *,
        progress: bool | None = None,
        **fields: Unpack[ChatFields],
    ) -> list[Result]:
        """Answers each of many conversations, in order."""
        jobs = (self._chat_job(messages, fields, number) for number, messages in enumerate(conversations))
        return self._run(jobs, conversations, progress)

    def stream(self, prompt: Prompt, **fields: Unpack[TextFields]) -> TextStream:
        """The pieces of a continuation as they come; closing the iterator, or dropping it, ends the work."""
        (make,) = self._text_jobs(_single(prompt), fields)
        return self._stream(make)

    def stream_chat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> TextStream:
        """The pieces of an answer to a conversation as they come."""
        return self._stream(self._chat_job(messages, fields))

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
        jobs = (
            functools.partial(
                self._jobs.score, prompt, continuation, truncate_prompt_tokens, priority, timeout
            )
            for prompt, continuation in map(_pair, pairs)
        )
        return self._run(jobs, pairs, progress)

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
        if pooling not in POOLINGS:
            raise BadRequest(f"'pooling' is {pooling!r}; it is 'mean' or 'last'.", param="pooling")
        given = _several(texts)
        jobs = (
            functools.partial(
                self._jobs.embed,
                text,
                pooling,
                add_special_tokens=add_special_tokens,
                priority=priority,
                timeout=timeout,
            )
            for text in given
        )
        vectors = self._run(jobs, given, progress)
        import numpy as np

        return np.stack(vectors) if vectors else np.empty((0, self._model.hidden_size), np.float32)

    async def agenerate(
        self, prompts: Prompt | Iterable[Prompt], **fields: Unpack[TextFields]
    ) -> list[Result]:
        """`generate` for an event loop. Cancelling the task ends the work."""
        return await self._arun(self._text_jobs(prompts, fields))

    async def achat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> Result:
        """`chat` for an event loop."""
        (result,) = await self._arun([self._chat_job(messages, fields)])
        return result

    def astream(self, prompt: Prompt, **fields: Unpack[TextFields]) -> AsyncIterator[Piece]:
        """`stream` for an event loop; the work begins with the first piece that is asked for."""
        (make,) = self._text_jobs(_single(prompt), fields)
        return stream_async(self._runtime, make, self._executor)

    def astream_chat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> AsyncIterator[Piece]:
        """`stream_chat` for an event loop."""
        return stream_async(self._runtime, self._chat_job(messages, fields), self._executor)

    def load_weights(self, arrays: Mapping[str, Any]) -> SwappedWeights:
        """Replaces the weights with these jax or NumPy arrays, and returns how long it took.

        The names and shapes are those of a Hugging Face checkpoint of the model; a head that is tied to the
        embedding may be left out. Types, tied heads and quantization are handled as when a model is opened,
        and nothing is compiled. Running prompts finish with the old weights, later ones wait for the new
        weights, and nothing computed with the old ones stays in the prefix cache. The arrays are copied. For
        arrays that do not fit it raises `BadRequest` and keeps the old weights.
        """
        self._require_open()
        if self._reloader is None:
            raise BadRequest("The weights of this model cannot be replaced.")
        try:
            return self._reloader.load(arrays, self._runtime.queue.hold_back)
        except StartupError as error:
            raise BadRequest(f"{error}", param="arrays") from error

    def close(self) -> None:
        """Ends all work, frees the memory and joins the threads. Closing twice is harmless."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._engine.begin_drain(0.0)
        self._runtime.queue.close()
        self._executor.shutdown()
        if self._on_close is not None:
            self._on_close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise Unavailable(
                f"The model {self.name} is closed; open it again to use it.", retry_after_seconds=0.0
            )
        self._engine.require_ready()

    def _text_jobs(
        self, prompts: Prompt | Iterable[Prompt], fields: Mapping[str, Any]
    ) -> Iterable[MakeJob[Result]]:
        """One job for each prompt, which is checked only when the job is made."""
        for number, prompt in enumerate(_several(prompts)):
            given = prompt if isinstance(prompt, str) else list(prompt)
            own = {"model": self.name, "prompt": given}
            yield functools.partial(self._make, CompletionBody, own, fields, number)

    def _chat_job(
        self, messages: Sequence[Message], fields: Mapping[str, Any], number: int = 0
    ) -> MakeJob[Result]:
        return functools.partial(
            self._make, ChatBody, {"model": self.name, "messages": messages}, fields, number
        )

    def _make(
        self,
        kind: type[ChatBody] | type[CompletionBody],
        own: Mapping[str, object],
        fields: Mapping[str, object],
        number: int,
    ) -> Job[Result]:
        return self._jobs.generate(make_body(kind, own, fields), number)

    def _stream(self, make: MakeJob[Result]) -> TextStream:
        self._require_open()
        return TextStream(self._runtime, make())

    def _run(self, jobs: Iterable[MakeJob[T]], given: object, progress: bool | None) -> list[T]:
        self._require_open()
        found: dict[int, T] = {}
        with show_progress(given, progress) as tick, closing(run_jobs(self._runtime, jobs)) as outcomes:
            for outcome in outcomes:
                found[outcome.number] = outcome.get()
                tick()
        return [found[number] for number in range(len(found))]

    async def _arun(self, jobs: Iterable[MakeJob[T]]) -> list[T]:
        self._require_open()
        found: dict[int, T] = {}
        async with aclosing(run_jobs_async(self._runtime, jobs, self._executor)) as outcomes:
            async for outcome in outcomes:
                found[outcome.number] = outcome.get()
        return [found[number] for number in range(len(found))]


def _several(prompts: Prompt | Iterable[Prompt]) -> Iterable[Prompt]:
    """A text, or a list of token ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and not isinstance(prompts[0], (str, Sequence)):
        return [_single(prompts)]
    if hasattr(prompts, "tolist"):
        return _several(prompts.tolist())
    return prompts  # type: ignore[return-value]


def _single(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    tokens: list[int] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not tokens or isinstance(tokens[0], (str, Sequence)):
        raise BadRequest("A stream has one prompt: a text, or a list of token ids.", param="prompt")
    return tokens


def _pair(pair: Any) -> tuple[Prompt, Prompt]:
    if isinstance(pair, str) or len(pair) != 2:
        raise BadRequest(f"A pair is a prompt and its continuation, not {pair!r}.", param="pairs")
    prompt, continuation = pair
    return prompt, continuation
