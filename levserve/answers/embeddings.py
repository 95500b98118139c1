"""The answer of /v1/embeddings: the pooled last hidden state of a model that was trained to generate text.

Used on HTTP threads and by batches. Every vector has length 1, so that a dot product is a cosine. The model
was not trained for this, so how well its vectors tell texts apart varies.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest, ContextTooLong
from levserve.generation import Choice
from levserve.request.decode import require_choice
from levserve.request.pooling import POOLINGS, make_vector
from levserve.request.schema import ModelName, Priority, PromptLimit, Seconds, check_prompt_limit
from levserve.request.submission import encode_text
from levserve.request.texts import Texts, check_texts, split_texts
from levserve.request.truncation import Truncation, bos_of, keep_last
from levserve.schedule.request import GenerationRequest

MAX_INPUTS = 2048  # OpenAI's limit
FORMATS = ("float", "base64")


class EmbeddingBody(Struct, frozen=True, kw_only=True):
    """The body of /v1/embeddings; `pooling` and `add_special_tokens` are not OpenAI's.

    The default format is float and the default pooling is mean.
    """

    model: ModelName
    input: Texts
    encoding_format: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    pooling: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    user: str | None = None
    timeout: Seconds | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        check_prompt_limit(self.truncate_prompt_tokens)
        if self.encoding_format is not None:
            require_choice(self.encoding_format, FORMATS, "encoding_format")
        if self.pooling is not None:
            require_choice(self.pooling, POOLINGS, "pooling")
        check_texts(self.input, "input")
        if len(self.inputs) > MAX_INPUTS:
            raise BadRequest(
                f"'input' has {len(self.inputs)} texts; at most {MAX_INPUTS} are accepted.",
                param="input",
                code="array_above_max_length",
            )

    @property
    def inputs(self) -> list[str | list[int]]:
        """Each text as a string to tokenize or as the tokens themselves."""
        return split_texts(self.input)


class Embedding(Struct, frozen=True):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"
    warnings: list[str] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class EmbeddingWork:
    """A checked and tokenized body: the sequences that run, and how the answer is made from them."""

    body: EmbeddingBody
    model: ServedModel
    model_name: str
    truncation: Truncation
    requests: list[GenerationRequest]

    def answer(self, choices: Sequence[Choice]) -> EmbeddingList:
        data = [Embedding(index, _show(choice, self.body)) for index, choice in enumerate(choices)]
        num_tokens = sum(len(request.prompt) for request in self.requests)
        warnings = self.truncation.warnings("input", self.model.max_seq_len)
        usage = EmbeddingUsage(num_tokens, num_tokens)
        return EmbeddingList(data, self.model_name, usage, warnings=warnings or UNSET)


def prepare_embeddings(
    body: EmbeddingBody,
    model: ServedModel,
    model_name: str,
    truncation: Truncation,
    engine_id: str,
    deadline: float | None,
) -> EmbeddingWork:
    """Checks the body against the model; raises `BadRequest`."""
    requests = [
        GenerationRequest(
            f"{engine_id}-{index}",
            tuple(tokens),
            0,
            deadline=deadline,
            wants_hidden=True,
            priority=body.priority or 0,
        )
        for index, tokens in enumerate(_tokenize(body, model, truncation))
    ]
    return EmbeddingWork(body, model, model_name, truncation, requests)


def _tokenize(body: EmbeddingBody, model: ServedModel, truncation: Truncation) -> list[list[int]]:
    if body.dimensions not in (None, model.hidden_size):
        raise BadRequest(
            f"'dimensions' is {body.dimensions}; this model's embeddings always have {model.hidden_size}.",
            param="dimensions",
        )
    adds_special = body.add_special_tokens is not False
    texts = []
    for index, given in enumerate(body.inputs):
        param = f"input[{index}]" if len(body.inputs) > 1 else "input"
        tokens = encode_text(
            given, model, param, add_special_tokens=adds_special, checks_length=not truncation
        )
        if not tokens:
            raise BadRequest(f"'{param}' has no tokens.", param=param)
        if truncation:
            kept = truncation.num_kept(len(tokens), model.max_seq_len)
            tokens = keep_last(tokens, kept, bos_of(model.tokenizer) if isinstance(given, str) else None)
        if len(tokens) > model.max_seq_len:
            raise ContextTooLong(len(tokens), 0, model.max_seq_len, param=param)
        texts.append(tokens)
    return texts


def _show(choice: Choice, body: EmbeddingBody) -> list[float] | str:
    vector = make_vector(choice, body.pooling)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    floats: list[float] = vector.tolist()
    return floats
