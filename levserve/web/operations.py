"""The types of every route: what it reads and what it answers, for `openapi.py` to describe."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct

from levserve.answers.answer import ChatChoice, ChatChunkChoice, Envelope, TextChoice
from levserve.answers.embeddings import EmbeddingBody, EmbeddingList
from levserve.answers.scoring import ScoreBody, Scores
from levserve.models.entry import Reloaded
from levserve.request.schema import (
    ChatBody,
    CompletionBody,
)
from levserve.web.admin import ModelStats, ReloadBody, Stats
from levserve.web.batches.objects import (
    BatchBody,
    BatchList,
    BatchObject,
    DeletedFile,
    FileList,
    FileObject,
)
from levserve.web.descriptions import FIELDS
from levserve.web.messages import body as message_body
from levserve.web.messages.objects import MessageEvent, MessageObject, TokenCount
from levserve.web.models import ModelEntry, ModelList
from levserve.web.native import GenerateBody, Generated, GeneratedChunk
from levserve.web.ops import Health, HealthReport, Readiness
from levserve.web.page import FrontPage
from levserve.web.responses.body import ResponseBody
from levserve.web.responses.event_types import ResponseEvent
from levserve.web.responses.objects import ResponseObject
from levserve.web.responses.routes import DeletedResponse, InputItemList, InputTokenCount
from levserve.web.tokens import (
    ConversationBody,
    DetokenizeBody,
    Prompt,
    TokenizeBody,
    Tokenized,
    TokenizerInfo,
)


class Operation(NamedTuple):
    """The types of one route. An `answer` that is a string is a content type."""

    answer: Any
    body: type[Struct] | None = None
    events: Any = None
    """The type of a stream's events."""
    failure: type[Struct] | None = None
    """The type of a 503's body, where it is a report and not an error."""
    query: dict[str, str] = {}
    form: dict[str, str] = {}
    """The fields of the body, if it is a form."""
    example: Any = None
    """A body to try."""


MESSAGES = [{"role": "user", "content": "Say hello."}]
GENERATE = {"prompts": ["The sky is"], "max_tokens": 16}
LIST_QUERY = {
    "limit": "items in the list, from 1 to 100; default 20",
    "order": "`desc` (default) begins with the newest, `asc` with the oldest",
    "after": "the id of an item; the list begins after it",
}
OPERATIONS = {
    "POST /v1/chat/completions": Operation(
        Envelope[ChatChoice],
        ChatBody,
        Envelope[ChatChunkChoice],
        example={"model": "", "messages": MESSAGES, "max_tokens": 32},
    ),
    "POST /v1/completions": Operation(
        Envelope[TextChoice],
        CompletionBody,
        Envelope[TextChoice],
        example={"model": "", "prompt": "The sky is", "max_tokens": 16},
    ),
    "POST /v1/responses": Operation(
        ResponseObject,
        ResponseBody,
        ResponseEvent,
        example={"model": "", "input": "Say hello.", "max_output_tokens": 32},
    ),
    "POST /v1/responses/input_tokens": Operation(
        InputTokenCount, ResponseBody, example={"model": "", "input": "Say hello."}
    ),
    "GET /v1/responses/{id}": Operation(ResponseObject),
    "DELETE /v1/responses/{id}": Operation(DeletedResponse),
    "POST /v1/responses/{id}/cancel": Operation(ResponseObject),
    "GET /v1/responses/{id}/input_items": Operation(InputItemList, query=LIST_QUERY),
    "POST /v1/messages": Operation(
        MessageObject,
        message_body.MessageBody,
        MessageEvent,
        example={"model": "", "messages": MESSAGES, "max_tokens": 32},
    ),
    "POST /v1/messages/count_tokens": Operation(
        TokenCount, message_body.PromptBody, example={"model": "", "messages": MESSAGES}
    ),
    "POST /v1/embeddings": Operation(
        EmbeddingList, EmbeddingBody, example={"model": "", "input": "The sky is blue."}
    ),
    "POST /v1/files": Operation(
        FileObject,
        form={
            "file": "the requests, one on each line",
            "purpose": "`batch`",
            "expires_after[anchor]": "`created_at`",
            "expires_after[seconds]": "how long the file is kept, from an hour to 30 days; default 30 days",
        },
    ),
    "GET /v1/files": Operation(
        FileList, query={**LIST_QUERY, "purpose": "only files of this purpose: `batch` or `batch_output`"}
    ),
    "GET /v1/files/{id}": Operation(FileObject),
    "DELETE /v1/files/{id}": Operation(DeletedFile),
    "GET /v1/files/{id}/content": Operation("application/octet-stream"),
    "POST /v1/batches": Operation(
        BatchObject,
        BatchBody,
        example={
            "input_file_id": "file-...",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    ),
    "GET /v1/batches": Operation(BatchList, query=LIST_QUERY),
    "GET /v1/batches/{id}": Operation(BatchObject),
    "POST /v1/batches/{id}/cancel": Operation(BatchObject),
    "GET /v1/models": Operation(ModelList),
    "GET /v1/models/{id}": Operation(ModelEntry),
    "GET /v1/ws": Operation(None),
    "POST /generate": Operation(Generated, GenerateBody, example=GENERATE),
    "POST /generate_stream": Operation(None, GenerateBody, GeneratedChunk, example=GENERATE),
    "POST /loglikelihood": Operation(
        Scores,
        ScoreBody,
        example={"prompts": ["The sky is"], "continuations": [" blue"], "details": True},
    ),
    "POST /tokenize": Operation(Tokenized, TokenizeBody, example={"prompt": "The sky is blue."}),
    "POST /detokenize": Operation(Prompt, DetokenizeBody, example={"tokens": [9, 10, 11]}),
    "POST /apply_template": Operation(Prompt, ConversationBody, example={"messages": MESSAGES}),
    "GET /tokenizer_info": Operation(TokenizerInfo, query={"model": FIELDS["model"]}),
    "GET /healthz": Operation(Health, failure=Health),
    "GET /health": Operation(HealthReport, failure=HealthReport),
    "GET /readyz": Operation(Readiness, failure=Readiness),
    "GET /metrics": Operation("text/plain"),
    "GET /metrics/router": Operation("text/plain"),
    "POST /admin/reload": Operation(Reloaded, ReloadBody, example={}),
    "GET /admin/stats": Operation(Stats),
    "POST /admin/load/{id}": Operation(ModelStats),
    "POST /admin/unload/{id}": Operation(ModelStats),
    "GET /": Operation(FrontPage),
    "GET /openapi.json": Operation("application/json"),
    "GET /docs": Operation("text/html"),
    "GET /static/{id}": Operation("*/*"),
}
