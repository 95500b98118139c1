"""Recognizes a Git LFS pointer, which takes the place of a file that was not downloaded."""

from __future__ import annotations

from pathlib import Path

LFS_START = b"version https://git-lfs"


def describe_pointer(path: Path) -> str | None:
    """Why the file cannot be read, if it is a pointer."""
    with path.open("rb") as file:
        if file.read(len(LFS_START)) != LFS_START:
            return None
    return (
        f"{path} is only a pointer of Git LFS: run `git lfs pull` in its folder, or download the file itself"
    )
