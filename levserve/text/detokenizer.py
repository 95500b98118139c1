"""Turns tokens back into text while they arrive, never splitting a character.

A `Detokenizer` lives on the HTTP thread of one request; `Tokenizer.detokenizer` makes it. Text is made from
the bytes each token spells, so the cost per token is constant and the pieces always join to what decoding
everything at once gives. (Decoding a window of tokens again and again, as tokenizers' own DecodeStream does,
stalls on invalid bytes.)
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from levserve.errors import StartupError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary writes bytes as token strings, and what stands between tokens."""

    is_byte_level: bool = False  # GPT-2's alphabet of 256 printable characters, one for each byte
    has_byte_tokens: bool = False  # sentencepiece's <0x0A> for bytes outside its vocabulary
    replacements: tuple[tuple[str, str], ...] = ()  # such as "▁" for a space
    separator: bytes = b""
    drops_first_space: bool = False  # encoding put a space before the text

    def spell(self, token: str) -> bytes:
        """The UTF-8 bytes of an ordinary (not an added) token."""
        if self.is_byte_level:
            return _spell_byte_level(token)
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode()


class Detokenizer:
    """Gives the text of one sequence as its tokens come; belongs to one HTTP thread.

    `spell` gives a token's bytes, or None for a token that is not shown. `add` holds back an incomplete UTF-8
    character until it is complete or cannot be any more; only bytes that no later token could mend become
    U+FFFD. With `continues` the text goes on from a prompt, so a space that stands before its first word is
    kept.
    """

    def __init__(
        self, spell: Callable[[int], bytes | None], spelling: Spelling, *, continues: bool = False
    ) -> None:
        self._spell = spell
        self._separator = spelling.separator
        self._drops_space = spelling.drops_first_space and not continues
        self._is_first = not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens and gives the text that is now certain."""
        if self._is_first or self._separator or self._drops_space:
            return self._utf8.decode(b"".join(self._next_bytes(token) for token in tokens))
        return self._utf8.decode(b"".join(filter(None, map(self._spell, tokens))))

    def flush(self) -> str:
        """Gives what is left at the end: U+FFFD if the last character is incomplete."""
        return self._utf8.decode(b"", final=True)

    def _next_bytes(self, token: int) -> bytes:
        spelt = self._spell(token)
        if spelt is None:
            return b""
        if self._separator and not self._is_first:
            spelt = self._separator + spelt
        self._is_first = False
        if self._drops_space and spelt:
            self._drops_space = False
            return spelt.removeprefix(b" ")
        return spelt


def read_spelling(decoder: Mapping[str, Any] | None) -> Spelling:
    """Reads the `decoder` of a tokenizer.json; a step we do not know is refused by name, as it would change
    the text."""
    if decoder is None:
        return Spelling(separator=b" ")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replacements: list[tuple[str, str]] = []
    drops_first_space = False
    for step in steps:
        match step:
            case {"type": "ByteLevel" | "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
                drops_first_space = step["prepend_scheme"] != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                drops_first_space = start == 1
            case _:
                raise StartupError(
                    f"the tokenizer's decoder step {dict(step)} is not supported; give another tokenizer with --tokenizer"
                )
    kinds = {step["type"] for step in steps}
    return Spelling(
        is_byte_level="ByteLevel" in kinds,
        has_byte_tokens="ByteFallback" in kinds,
        replacements=tuple(replacements),
        drops_first_space=drops_first_space,
    )


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # not in the alphabet: the token stands for itself
        return token.encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 byte is its own character, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()
