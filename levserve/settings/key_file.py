"""Reads a file of bearer keys: one key per line, and `#` starts a comment."""

from __future__ import annotations

import re
from pathlib import Path

from levserve.errors import ConfigError
from levserve.settings.kind import BEARER_KEY


def read_keys(flag: str, path: str, source: str) -> tuple[str, ...]:
    place = f"{flag} {path} ({source})"
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{place}: not UTF-8 text") from None
    keys = [re.split(r"(?:^|\s)#", line)[0].split() for line in lines]  # a # within a key belongs to it
    for number, words in enumerate(keys, start=1):
        if len(words) > 1:
            raise ConfigError(f"{place}: line {number} has more than one word; a key cannot contain spaces")
        if words and not BEARER_KEY.fullmatch(words[0]):
            raise ConfigError(f"{place}: line {number} has characters that are not visible ASCII")
    if not any(keys):
        raise ConfigError(f"{place}: the file contains no key")
    return tuple(key for words in keys for key in words)
