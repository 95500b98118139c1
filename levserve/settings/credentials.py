"""Masks credentials in addresses, so that logs, messages and --print-config can show the rest of them.

`http://user:password@host/model.gguf?X-Amz-Signature=...` becomes `http://***@host/model.gguf?***`.
"""

from __future__ import annotations

import re

ADDRESS = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^\s/?#]*@)?(?P<place>[^\s?]*)(?P<query>\?\S*)?"
)


def without_credentials(text: str) -> str:
    """The text with every address in it shown without its user, its password and its query."""
    return ADDRESS.sub(_mask, text)


def _mask(found: re.Match[str]) -> str:
    user = "***@" if found["user"] else ""
    query = "?***" if found["query"] else ""
    return f"{found['scheme']}{user}{found['place']}{query}"
