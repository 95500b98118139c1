"""Checks the layout of XLA's call structs against the header that jaxlib ships.

Kernels read XLA's call frame by offsets. The header of the installed jaxlib says where each field lies. If
one has moved, or the interface has an unknown version, kernels would read and write the wrong memory, so they
must not be used.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import jaxlib

HEADER = Path(jaxlib.__file__).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
KNOWN_VERSIONS = ((0, 3), (0, 4), (0, 5))
"""The headers of 0.3 and 0.5 were compared by hand; for 0.4 only the layout is checked."""
WORD = 8
SMALL_TYPES = {"int": 4, "int32_t": 4, "uint32_t": 4}


class Offset(NamedTuple):
    """A field of a struct and the word at which it is expected."""

    struct: str
    field: str
    word: int


class Version(NamedTuple):
    major: int
    minor: int


class UnsupportedHeader(Exception):
    """The message says what differs from what kernels expect."""


@functools.cache
def header_mismatch(header: Path, expected: tuple[Offset, ...]) -> str | None:
    """How this header differs from what kernels expect, or None."""
    try:
        read_version(header)
        for offset in expected:
            _check(_read(header), offset)
    except UnsupportedHeader as error:
        return str(error)
    return None


def read_version(header: Path) -> Version:
    """The version of the interface; raises `UnsupportedHeader` if it is unknown."""
    text = _read(header)
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if numbers[0] is None or numbers[1] is None:
        raise UnsupportedHeader(f"{header.name} defines no API version")
    version = Version(int(numbers[0][1]), int(numbers[1][1]))
    if version not in KNOWN_VERSIONS:
        raise UnsupportedHeader(f"the XLA FFI version {version.major}.{version.minor} is unknown")
    return version


def _read(header: Path) -> str:
    try:
        return header.read_text()
    except OSError as error:
        raise UnsupportedHeader(f"{header.name} cannot be read: {error.strerror}") from None


def _check(text: str, expected: Offset) -> None:
    offsets, _ = _lay_out(text, expected.struct, expected.field)
    found = offsets.get(expected.field)
    if found != expected.word * WORD:
        where = "is not there" if found is None else f"lies at byte {found}, not {expected.word * WORD}"
        raise UnsupportedHeader(f"the field {expected.field} of {expected.struct} {where}")


def _lay_out(text: str, struct: str, last: str | None = None) -> tuple[dict[str, int], int]:
    """The byte offsets of a struct's fields up to `last`, by C's rules of alignment, and their size."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}}", text, flags=re.DOTALL)
    if body is None:
        raise UnsupportedHeader(f"the header has no struct {struct}")
    offsets: dict[str, int] = {}
    at = 0
    declarations = re.sub(r"//[^\n]*", "", body[1]).split(";")
    for declaration in filter(None, map(str.strip, declarations)):
        name, size, alignment = _measure(text, declaration)
        at = -(-at // alignment) * alignment
        offsets[name] = at
        at += size
        if name == last:
            break
    return offsets, -(-at // WORD) * WORD


def _measure(text: str, declaration: str) -> tuple[str, int, int]:
    """The name, size and alignment of a declared field."""
    if function := re.fullmatch(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", declaration):
        return function[1], WORD, WORD
    kind, name = re.fullmatch(r"(.*?)(\w+)", declaration, flags=re.DOTALL).groups()  # type: ignore[union-attr]
    kind = kind.strip()
    if "*" in kind or kind in ("size_t", "int64_t", "uint64_t"):
        return name, WORD, WORD
    if kind in SMALL_TYPES or (re.search(rf"\}} {kind};", text) and f"struct {kind} {{" not in text):
        return name, 4, 4  # enums are ints
    _, size = _lay_out(text, kind)
    return name, size, WORD
