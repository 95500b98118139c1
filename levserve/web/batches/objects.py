"""OpenAI's objects of files and batches, as clients get them and as they are kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from levserve.batch.endpoints import ENDPOINTS
from levserve.errors import BadRequest
from levserve.request.decode import require_choice
from levserve.request.schema import Metadata
from levserve.web.listing import ItemList

SECONDS_OF = {"h": 3600, "d": 86400}
MAX_WINDOW_SECONDS = 30 * 86400
LEAST_EXPIRY_SECONDS, MOST_EXPIRY_SECONDS = 3600, 30 * 86400
"""OpenAI's bounds of `expires_after`."""


class FileObject(Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class StoredFile(Struct, frozen=True):
    owner: str
    file: FileObject


class FileList(ItemList[FileObject], frozen=True):
    pass


class DeletedFile(Struct, frozen=True):
    id: str
    object: str = "file"
    deleted: bool = True


class ExpiresAfter(Struct, frozen=True):
    """How long a file is kept, from its creation on."""

    seconds: Annotated[int, Meta(ge=LEAST_EXPIRY_SECONDS, le=MOST_EXPIRY_SECONDS)]
    anchor: str = "created_at"

    def __post_init__(self) -> None:
        require_choice(self.anchor, ("created_at",), "output_expires_after.anchor")


class BatchBody(Struct, frozen=True, kw_only=True):
    """The body of a request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    def __post_init__(self) -> None:
        require_choice(self.endpoint, ENDPOINTS, "endpoint")
        if self.window_seconds is None:
            raise BadRequest(
                "'completion_window' must be a number of hours or days up to 30 days, such as '24h' or '7d'.",
                param="completion_window",
                code="invalid_value",
            )

    @property
    def window_seconds(self) -> int | None:
        count, unit = self.completion_window[:-1], self.completion_window[-1:]
        if not (count.isascii() and count.isdecimal()) or len(count) > 4 or unit not in SECONDS_OF:
            return None
        seconds = int(count) * SECONDS_OF[unit]
        return seconds if 0 < seconds <= MAX_WINDOW_SECONDS else None


class LineProblem(Struct, frozen=True):
    """Why the input of a batch was refused; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class ProblemList(Struct, frozen=True):
    data: Sequence[LineProblem]
    object: str = "list"


class RequestCounts(Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(Struct, frozen=True, kw_only=True):
    """Times are seconds since 1970; those of states that the batch has not reached are null."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: ProblemList | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    """validating, failed, in_progress, finalizing, completed, expired, cancelling or cancelled."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class StoredBatch(Struct, frozen=True):
    owner: str
    batch: BatchObject
    output_seconds: int | None = None
    """How long its results are kept, if the client set it."""


class BatchList(ItemList[BatchObject], frozen=True):
    pass


ENDED = ("completed", "failed", "expired", "cancelled")
STATUSES = ("validating", "in_progress", "finalizing", "cancelling", *ENDED)


def is_ended(batch: BatchObject) -> bool:
    return batch.status in ENDED
