"""The ids of calls: OpenAI's form, or the nine letters and digits that Mistral's templates insist on."""

from __future__ import annotations

import hashlib
import random
import re
import string

CHARACTERS = string.ascii_letters + string.digits
SHORT = re.compile(r"[a-zA-Z0-9]{9}")


def make_id(*, is_short: bool) -> str:
    if is_short:
        return "".join(random.choices(CHARACTERS, k=9))
    return f"call_{''.join(random.choices(CHARACTERS, k=24))}"


def shorten_id(call_id: str) -> str:
    """The same id as nine letters and digits; another server may have made it."""
    if SHORT.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode(errors="replace"), digest_size=8).digest())
    digits = []
    for _ in range(9):
        number, place = divmod(number, len(CHARACTERS))
        digits.append(CHARACTERS[place])
    return "".join(digits)
