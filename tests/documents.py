"""The README and the pages under docs/: their code blocks, links and anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs" / "pages").rglob("*.md"))
DOCUMENTS = [README, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")), *PAGES]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block; `place` is its file and line, for the name of a test."""

    place: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    """Every block of the documents in one of these languages; equal blocks are listed once."""
    found: dict[str, Block] = {}
    for path in DOCUMENTS:
        text = path.read_text()
        for fence in FENCE.finditer(text):
            line = text.count("\n", 0, fence.start()) + 1
            if fence[1] in languages:
                found.setdefault(fence[2], Block(f"{path.relative_to(ROOT)}:{line}", fence[1], fence[2]))
    return list(found.values())


def links(path: Path) -> Iterator[str]:
    """The targets of a page's links and images, except those inside code."""
    prose = FENCE.sub("", path.read_text())
    without_code = CODE.sub("code", prose)
    yield from LINK.findall(without_code)


def anchors(path: Path) -> set[str]:
    """The anchors that links to a page may use: those that mkdocs and forges derive alike from a heading."""
    found = set()
    for heading in HEADING.findall(FENCE.sub("", path.read_text())):
        bare = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        site, forge = re.sub(r"[-\s]+", "-", bare), bare.replace(" ", "-")
        if site == forge:
            found.add(site)
    return found


def commands(program: str, *texts: str) -> list[list[str]]:
    """The arguments of each call of a program of bench/, in the documents and in these texts."""
    pages = [path.read_text() for path in DOCUMENTS]
    call = re.compile(rf"^(?:\$ |  )python3? bench/{re.escape(program)} (.*)$", re.MULTILINE)
    return [shlex.split(found, comments=True) for text in (*pages, *texts) for found in call.findall(text)]
