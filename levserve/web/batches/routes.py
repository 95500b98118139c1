"""OpenAI's /v1/files and /v1/batches. The views run on HTTP threads and touch no device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from flask import Blueprint, Response, request
from gunicorn.http.errors import NoMoreData, ParseException
from werkzeug.exceptions import UnsupportedMediaType

from levserve.errors import BadRequest, Conflict, NotFound, Unavailable, cause_of
from levserve.request.decode import decode, missing, read_integer, require_choice
from levserve.settings.settings import Settings
from levserve.web.auth import key_owner
from levserve.web.batches.files import FileStore
from levserve.web.batches.objects import (
    LEAST_EXPIRY_SECONDS,
    MOST_EXPIRY_SECONDS,
    BatchBody,
    BatchList,
    BatchObject,
    DeletedFile,
    FileList,
    FileObject,
)
from levserve.web.batches.store import BatchStore
from levserve.web.batches.worker import BatchWorker
from levserve.web.cors import Cors
from levserve.web.json_body import json_response, read_body
from levserve.web.listing import take_page

log = logging.getLogger(__name__)

PURPOSE = "batch"
BLOCK_BYTES = 1 << 16
MAX_FILES_LISTED = 10_000
MAX_BATCHES_LISTED, DEFAULT_BATCHES_LISTED = 100, 20
RETRY_SECONDS = 60.0  # after the disk was full


def files_routes(files: FileStore, batches: BatchStore, cors: Cors) -> Blueprint:
    routes = Blueprint("files", __name__)

    @routes.post("/v1/files")
    def upload_file() -> Response:
        cors.check_origin("file")
        with _keeping("file"):
            return json_response(_upload(files))

    @routes.get("/v1/files")
    def list_files() -> Response:
        purpose = request.args.get("purpose")
        found = [one for one in files.owned_by(key_owner()) if purpose in (None, one.purpose)]
        limit = MAX_FILES_LISTED
        return json_response(take_page(FileList, found, default_limit=limit, max_limit=limit))

    @routes.get("/v1/files/<file_id>")
    def read_file(file_id: str) -> Response:
        return json_response(find(file_id))

    @routes.delete("/v1/files/<file_id>")
    def delete_file(file_id: str) -> Response:
        found = find(file_id)
        if batches.uses_file(found.id):
            raise Conflict("A batch that has not ended reads this file; cancel it first.")
        files.delete(found.id)
        return json_response(DeletedFile(found.id))

    @routes.get("/v1/files/<file_id>/content")
    def read_content(file_id: str) -> Response:
        found = find(file_id)
        try:
            file = files.path_of(found.id).open("rb")
        except FileNotFoundError:  # deleted a moment ago
            raise _no_file(file_id) from None
        blocks = iter(partial(file.read, BLOCK_BYTES), b"")
        response = Response(blocks, content_type="application/octet-stream")
        response.content_length = found.bytes
        response.call_on_close(file.close)
        return response

    def find(file_id: str) -> FileObject:
        found = files.get(file_id, key_owner())
        if found is None:
            raise _no_file(file_id)
        return found

    return routes


def batches_routes(
    files: FileStore, batches: BatchStore, worker: BatchWorker, settings: Settings
) -> Blueprint:
    routes = Blueprint("batches", __name__)

    @routes.post("/v1/batches")
    def create_batch() -> Response:
        body = decode(read_body(settings.max_body_bytes), BatchBody)
        given = files.get(body.input_file_id, key_owner())
        if given is None:
            raise BadRequest(
                f"There is no file with the id '{body.input_file_id[:64]}'.", param="input_file_id"
            )
        if given.purpose != PURPOSE:
            raise BadRequest(f"The file's purpose is not '{PURPOSE}'.", param="input_file_id")
        with _keeping("batch"):
            batch = batches.create(body, key_owner())
        worker.wake()
        return json_response(batch)

    @routes.get("/v1/batches")
    def list_batches() -> Response:
        found = batches.owned_by(key_owner())
        page = take_page(BatchList, found, default_limit=DEFAULT_BATCHES_LISTED, max_limit=MAX_BATCHES_LISTED)
        return json_response(page)

    @routes.get("/v1/batches/<batch_id>")
    def read_batch(batch_id: str) -> Response:
        return json_response(find(batch_id))

    @routes.post("/v1/batches/<batch_id>/cancel")
    def cancel_batch(batch_id: str) -> Response:
        with _keeping("batch"):
            return json_response(batches.cancel(find(batch_id).id))

    def find(batch_id: str) -> BatchObject:
        found = batches.get(batch_id, key_owner())
        if found is None:
            raise NotFound(f"There is no batch with the id '{batch_id[:64]}'.", param="batch_id")
        return found

    return routes


@contextmanager
def _keeping(what: str) -> Iterator[None]:
    """Refuses a request where the disk does not take what must be kept, because it is full for example."""
    try:
        yield
    except OSError as error:
        log.error("cannot keep a %s: %s", what, error)
        message = f"The server cannot keep the {what}: {cause_of(error)}."
        raise Unavailable(message, retry_after_seconds=RETRY_SECONDS) from None


def _no_file(file_id: str) -> NotFound:
    return NotFound(f"There is no file with the id '{file_id[:64]}'.", param="file_id")


def _upload(files: FileStore) -> FileObject:
    if request.mimetype != "multipart/form-data":
        raise UnsupportedMediaType("Send the file as multipart/form-data.")
    try:
        form, uploads = request.form, request.files
    except (ParseException, NoMoreData) as error:
        raise BadRequest(f"The chunked body is malformed: {error}.") from None
    upload, purpose = uploads.get("file"), form.get("purpose")
    if upload is None:
        raise missing("file")
    if purpose is None:
        raise missing("purpose")
    require_choice(purpose, (PURPOSE,), "purpose")
    seconds = _expiry(form.get("expires_after[seconds]"), form.get("expires_after[anchor]"))
    return files.create(upload.stream, upload.filename or "file", purpose, key_owner(), seconds)


def _expiry(seconds: str | None, anchor: str | None) -> int | None:
    if seconds is None and anchor is None:
        return None
    if anchor is not None:
        require_choice(anchor, ("created_at",), "expires_after.anchor")
    if seconds is None:
        raise missing("expires_after.seconds")
    return read_integer(seconds, "expires_after.seconds", LEAST_EXPIRY_SECONDS, MOST_EXPIRY_SECONDS)
