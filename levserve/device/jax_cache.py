"""jax's own cache of compiled programs, which lies in the same folder as ours.

jax never replaces an entry, not even one that a full disk has cut short: it would compile that program at
every start, each time with a warning. Removed before jax looks for it, it is written again.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

ENTRIES = "*-cache"
CHECKED = "checked"
"""A file that is as old as the last check: entries that are older are whole, and are not read again."""


def remove_damaged(folder: Path) -> None:
    """Removes the entries that jax cannot read. One that another process is writing may go too, and is
    compiled once more."""
    try:
        from jax._src.compilation_cache import decompress_executable
    except ImportError:  # a later jax: the warnings stay
        return
    checked = folder / CHECKED
    last_check = checked.stat().st_mtime if checked.exists() else 0.0
    with suppress(OSError):  # the folder may belong to another user
        checked.touch()
    for entry in folder.glob(ENTRIES):
        with suppress(OSError):
            if entry.stat().st_mtime < last_check:
                continue
            data = entry.read_bytes()
            try:
                decompress_executable(data)
            except Exception:  # of the library that jax compresses with
                log.info("%s is damaged; it is compiled again", entry.name)
                entry.unlink(missing_ok=True)
