"""What an operator may do to a running server: swap in newer weights. Under /admin, with keys of its own (see `auth.py`).

The view reads the new weights on its HTTP thread, which may take minutes; `/readyz` tells how far it is.
"""

from __future__ import annotations

from flask import Blueprint, Response
from msgspec import Struct

from levserve.engine.engine import Engine
from levserve.errors import BadRequest, ConfigError, Conflict, StartupError
from levserve.web.body import read_body
from levserve.web.decode import decode
from levserve.web.ops import json_response

MAX_BODY_BYTES = 1 << 16


class ReloadBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the weights are, in the words of the settings; by default where they came from."""

    model: str | None = None
    checkpoint_path: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.model and self.checkpoint_path:
            raise BadRequest("'model' and 'checkpoint_path' exclude each other.", param="checkpoint_path")


def admin_routes(engine: Engine) -> Blueprint:
    routes = Blueprint("admin", __name__)

    @routes.post("/admin/reload")
    def reload() -> Response:
        body = decode(read_body(MAX_BODY_BYTES) or b"{}", ReloadBody)
        try:
            reloaded = engine.reload(
                model=body.model or "", checkpoint_path=body.checkpoint_path or "", revision=body.revision or ""
            )
        except ConfigError as error:
            raise BadRequest(f"Nothing was reloaded: {error}.", code="reload_refused") from error
        except StartupError as error:
            raise Conflict(f"Nothing was reloaded, the old weights go on serving: {error}.", code="reload_refused") from error
        return json_response(reloaded)

    return routes
