"""Builds a tokenizer from sentencepiece's pieces and scores, as in a tokenizer.model or a GGUF file.

sentencepiece merges into the piece with the best score; the `tokenizers` library merges ranked pairs, which
are computed from the scores here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from levserve.errors import StartupError

SPACE = "▁"


class PieceType(IntEnum):
    """sentencepiece's own numbers, which GGUF uses too."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Pieces(NamedTuple):
    """A vocabulary; the lists are indexed by token id."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    adds_space: bool
    """Whether encoding puts a space before the text and after every special token."""
    is_unigram: bool = False


def build_sentencepiece(pieces: Pieces, *, strips_after: bool = False) -> Tokenizer:
    """With `strips_after`, a control token includes the spaces after it, as Phi-3's do."""
    backend = Tokenizer(_unigram(pieces) if pieces.is_unigram else _bpe(pieces))
    normalizer: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.adds_space:
        normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(steps)
    if pieces.is_unigram:  # words are split first, or a long text would take too long
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(f"{SPACE}[^{SPACE}]*"), behavior="isolated")
    added = added_tokens(
        pieces.texts, pieces.types, strips_after=strips_after, finds_spaces=not pieces.adds_space
    )
    backend.add_tokens(added)
    return backend


def added_tokens(
    texts: list[str], types: list[int], *, strips_after: bool = False, finds_spaces: bool = False
) -> list[AddedToken]:
    """The tokens that are found in a text before it is split.

    With `finds_spaces`, those that a user defined with spaces in them, which are spelt with `SPACE`, are
    found as well. The library would put the space that encoding adds into them, so then they are merged.
    """
    added = []
    for text, kind in zip(texts, types, strict=True):
        if kind in (PieceType.CONTROL, PieceType.UNKNOWN, PieceType.USER_DEFINED):
            is_special = kind != PieceType.USER_DEFINED
            strips = strips_after and kind == PieceType.CONTROL
            is_normalized = finds_spaces and not is_special and SPACE in text
            added.append(AddedToken(text, special=is_special, normalized=is_normalized, rstrip=strips))
    return added


def _bpe(pieces: Pieces) -> models.BPE:
    vocab = {text: token for token, text in enumerate(pieces.texts)}
    unknown = None if (token := _unknown(pieces)) is None else pieces.texts[token]
    return models.BPE(vocab, _merges(pieces, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _merges(pieces: Pieces, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to merge two pieces into an ordinary piece, the best piece first."""
    mergeable = set()
    for text, kind in zip(pieces.texts, pieces.types, strict=True):
        if kind in (PieceType.NORMAL, PieceType.USER_DEFINED):
            mergeable.add(text)
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.types, strict=True):
        has_space = kind == PieceType.USER_DEFINED and pieces.adds_space and SPACE in text
        if kind != PieceType.NORMAL and not has_space:  # control tokens are never merged from text
            continue
        for middle in range(1, len(text)):
            left, right = text[:middle], text[middle:]
            if left in mergeable and right in mergeable:
                found.append((-score, vocab[left], vocab[right], (left, right)))
    return [pair for _, _, _, pair in sorted(found)]


def _unigram(pieces: Pieces) -> models.Unigram:
    scored = list(zip(pieces.texts, pieces.scores, strict=True))
    has_bytes = PieceType.BYTE in pieces.types
    return models.Unigram(scored, unk_id=_unknown(pieces), byte_fallback=has_bytes)


def _unknown(pieces: Pieces) -> int | None:
    return pieces.types.index(PieceType.UNKNOWN) if PieceType.UNKNOWN in pieces.types else None


def read_sentencepiece(path: Path) -> Pieces:
    """Reads a tokenizer.model: the fields of sentencepiece's protobuf that define how text becomes pieces."""
    texts, scores, types = [], [], []
    try:
        fields = list(_fields(path.read_bytes()))
        for number, value in fields:
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                texts.append(_bytes(piece[1]).decode())
                scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
                types.append(int(PieceType(_number(piece.get(3, PieceType.NORMAL)))))
        if not texts:
            raise ValueError("no pieces")
        trainer = dict(_fields(_bytes(dict(fields).get(2, b""))))
        normalizer = dict(_fields(_bytes(dict(fields).get(3, b""))))
    except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        hint = "use --tokenizer to give a folder with tokenizer.json"
        raise StartupError(f"{path} is not a sentencepiece model ({error!r}); {hint}") from error
    adds_space, is_unigram = bool(normalizer.get(3, 1)), trainer.get(3, 1) == 1
    return Pieces(texts, scores, types, adds_space, is_unigram)


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where bytes are expected")
    return value


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TypeError("bytes where a number is expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a protobuf message: varints as int, everything else as bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        length = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        if at + length > len(data):
            raise ValueError(f"truncated at {at:,}")
        yield key >> 3, data[at : at + length]
        at += length
