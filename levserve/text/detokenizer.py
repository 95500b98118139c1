"""Turns tokens back into text as they arrive, without ever splitting a character.

Text is made from the bytes of each token, so the cost per token is constant, and the parts always join to
what decoding everything at once would give. The DecodeStream of the tokenizers library decodes a window of
tokens again and again instead, and stalls on invalid bytes.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from levserve.errors import StartupError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary writes bytes as token strings, and what separates tokens."""

    is_byte_level: bool = False  # GPT-2's alphabet of 256 printable characters, one for each byte
    has_byte_tokens: bool = False  # sentencepiece's <0x0A> for bytes outside its vocabulary
    replacements: tuple[tuple[str, str], ...] = ()  # such as "▁" for a space
    separator: bytes = b""
    drops_first_space: bool = False  # because encoding puts a space before the text

    def spell(self, token: str) -> bytes:
        """The UTF-8 bytes of an ordinary token."""
        if self.is_byte_level:
            return _spell_byte_level(token)
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode()

    def spell_added(self, token: str) -> bytes:
        """The UTF-8 bytes of an added token. Only GPT-2's alphabet does not apply to these."""
        return token.encode() if self.is_byte_level else self.spell(token)


class Detokenizer:
    """The text of one sequence as its tokens arrive; used by one thread at a time.

    `spell` gives a token's bytes, or None for a token that is not shown. `add` holds back an incomplete UTF-8
    character until it is complete or invalid; only invalid bytes become U+FFFD. With `continues` the text
    follows a prompt, so the space before its first word is kept.
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
        """Takes the next tokens and returns the text that is now certain."""
        if self._is_first or self._separator or self._drops_space:
            return self._utf8.decode(b"".join(self._next_bytes(token) for token in tokens))
        return self._utf8.decode(b"".join(filter(None, map(self._spell, tokens))))

    def flush(self) -> str:
        """Returns the rest at the end: U+FFFD if the last character is incomplete."""
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
    """Reads the `decoder` of a tokenizer.json; refuses an unknown step, because it would change the text."""
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
                problem = f"the tokenizer's decoder step {dict(step)} is not supported"
                raise StartupError(f"{problem}; give another tokenizer with --tokenizer")
    kinds = {step["type"] for step in steps}
    return Spelling(
        is_byte_level="ByteLevel" in kinds,
        has_byte_tokens="ByteFallback" in kinds,
        replacements=tuple(replacements),
        drops_first_space=drops_first_space,
    )


def _spell_byte_level(token: str) -> bytes:
    try:
        return codecs.charmap_encode(token, "strict", _GPT2_ALPHABET)[0]
    except UnicodeEncodeError:  # not in the alphabet: the token is its own text
        return token.encode()


def _gpt2_alphabet() -> str:
    """The character of each byte: a printable Latin-1 byte is its own; the others start at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = map(chr, itertools.count(0x100))
    return "".join(chr(byte) if byte in printable else next(others) for byte in range(256))


_GPT2_ALPHABET = codecs.charmap_build(_gpt2_alphabet())
