"""Lets pages link to files of the repository that are not part of the site.

In a checkout, or where a forge shows the repository, such a link opens the file. The site does not carry the file, so there
the link becomes its text; links between pages stay, and `mkdocs build --strict` checks them.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def unlink(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        return match[1] if target.startswith("../") else match[0]

    return LINK.sub(unlink, markdown)
