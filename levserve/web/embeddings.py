"""The embeddings endpoint: the pooled last hidden state of a model that was trained to generate.

Views run on HTTP threads. Every vector has length 1, so that a dot product is a cosine. How well such vectors tell texts
apart is the model's affair: it was not trained for that.
"""

from __future__ import annotations

import base64
from contextlib import ExitStack
from typing import Annotated, Any

import msgspec
from flask import Blueprint, Response, g, request
from msgspec import Meta, Struct

from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest, ContextTooLong
from levserve.generation import Choice
from levserve.schedule.request import GenerationRequest
from levserve.settings.settings import Settings
from levserve.web.admit import admit, asked_timeout
from levserve.web.body import read_body
from levserve.web.json_body import decode, unsupported
from levserve.web.run import Runs
from levserve.web.schema import Seconds, require_choice
from levserve.web.submission import encode_text
from levserve.web.texts import Texts, check_texts, split_texts

MAX_INPUTS = 2048  # OpenAI's limit
FORMATS = ("float", "base64")
POOLINGS = ("mean", "last")


class EmbeddingBody(Struct, frozen=True, kw_only=True):
    """The body of /v1/embeddings; `pooling` and `add_special_tokens` are not OpenAI's.

    Left out, the format is float and the pooling mean.
    """

    model: str
    input: Texts
    encoding_format: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    pooling: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Any = None
    user: str | None = None
    timeout: Seconds | None = None

    def __post_init__(self) -> None:
        if self.truncate_prompt_tokens is not None:
            raise unsupported("truncate_prompt_tokens")
        if self.encoding_format is not None:
            require_choice(self.encoding_format, FORMATS, "encoding_format")
        if self.pooling is not None:
            require_choice(self.pooling, POOLINGS, "pooling")
        check_texts(self.input, "input")
        if len(self.inputs) > MAX_INPUTS:
            raise BadRequest(
                f"'input' has {len(self.inputs)} texts; at most {MAX_INPUTS} are taken at a time.",
                param="input",
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


class Embeddings:
    """The view of /v1/embeddings; shared by all HTTP threads and without state of any one request."""

    def __init__(self, engine: Engine, settings: Settings, runs: Runs) -> None:
        self._engine = engine
        self._settings = settings
        self._runs = runs

    def routes(self) -> Blueprint:
        routes = Blueprint("embeddings", __name__)
        routes.add_url_rule("/v1/embeddings", view_func=self.embed, methods=["POST"])
        return routes

    def embed(self) -> Response:
        with ExitStack() as held:
            reservation = held.enter_context(admit(self._engine))
            body = decode(read_body(self._settings.max_body_bytes), EmbeddingBody)
            client = request.environ.get("gunicorn.socket")
            engine_id, deadline = (
                self._runs.new_id(g.request_id),
                self._runs.deadline(g.started, asked_timeout(), body.timeout),
            )
            model = self._runs.borrow(body.model, held, deadline, client)
            texts = _tokenize(body, model)
            requests = [
                GenerationRequest(
                    f"{engine_id}-{index}", tuple(tokens), 0, deadline=deadline, wants_hidden=True
                )
                for index, tokens in enumerate(texts)
            ]
            choices = self._runs.compute(requests, model, reservation, g.record, client)
        data = [Embedding(index, _embedding(choice, body)) for index, choice in enumerate(choices)]
        num_tokens = sum(len(tokens) for tokens in texts)
        answer = EmbeddingList(data, model.name, EmbeddingUsage(num_tokens, num_tokens))
        return Response(msgspec.json.encode(answer), content_type="application/json")


def _tokenize(body: EmbeddingBody, model: ServedModel) -> list[list[int]]:
    if body.dimensions not in (None, model.hidden_size):
        message = f"This model's embeddings have {model.hidden_size} dimensions, no fewer; 'dimensions' is {body.dimensions}."
        raise BadRequest(message, param="dimensions")
    adds_special = body.add_special_tokens is not False
    texts = [encode_text(text, model, "input", add_special_tokens=adds_special) for text in body.inputs]
    for tokens in texts:
        if not tokens:
            raise BadRequest("A text of 'input' has no tokens.", param="input")
        if len(tokens) > model.max_seq_len:
            raise ContextTooLong(len(tokens), 0, model.max_seq_len, param="input")
    return texts


def _embedding(choice: Choice, body: EmbeddingBody) -> list[float] | str:
    import numpy as np  # 0.1 s that the start has no time for

    assert choice.hidden is not None  # it was asked for
    vector = np.array(choice.hidden.last if body.pooling == "last" else choice.hidden.mean, dtype="<f4")
    vector /= np.linalg.norm(vector) or 1.0
    if body.encoding_format == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    floats: list[float] = vector.tolist()
    return floats
