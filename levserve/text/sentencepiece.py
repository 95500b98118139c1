"""Builds a tokenizer from sentencepiece's pieces and scores, as a tokenizer.model or a GGUF file keeps them.

The `tokenizers` library merges by ranked pairs where sentencepiece merges into the piece with the best score;
the pairs are worked out from the scores. Called once while loading.
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
    """Sentencepiece's own numbers, which GGUF has taken over."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Pieces(NamedTuple):
    """A vocabulary, by token id."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    adds_space: bool
    """Whether a space is put before a text and after every special token."""
    is_unigram: bool = False


def build_sentencepiece(pieces: Pieces, *, strips_after: bool = False) -> Tokenizer:
    """With `strips_after` a special token takes the spaces after it, as Phi-3's do."""
    backend = Tokenizer(_unigram(pieces) if pieces.is_unigram else _bpe(pieces))
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if pieces.adds_space else spaces
    )
    if pieces.is_unigram:  # words are split first, or a long text would take too long
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(f"{SPACE}[^{SPACE}]*"), behavior="isolated")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if pieces.adds_space else steps)
    backend.add_tokens(
        [
            AddedToken(
                text,
                special=kind != PieceType.USER_DEFINED,
                normalized=False,
                rstrip=strips_after and kind == PieceType.CONTROL,
            )
            for text, kind in zip(pieces.texts, pieces.types, strict=True)
            if kind in (PieceType.CONTROL, PieceType.UNKNOWN, PieceType.USER_DEFINED)
        ]
    )
    return backend


def _bpe(pieces: Pieces) -> models.BPE:
    vocab = {text: token for token, text in enumerate(pieces.texts)}
    unknown = next(
        (text for text, kind in zip(pieces.texts, pieces.types) if kind == PieceType.UNKNOWN), None
    )
    return models.BPE(vocab, _merges(pieces, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _merges(pieces: Pieces, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to put an ordinary piece together from two others, best piece first."""
    mergeable = {
        text
        for text, kind in zip(pieces.texts, pieces.types)
        if kind in (PieceType.NORMAL, PieceType.USER_DEFINED)
    }
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.types, strict=True):
        if kind != PieceType.NORMAL:  # a control token is never made of text
            continue
        for middle in range(1, len(text)):
            left, right = text[:middle], text[middle:]
            if left in mergeable and right in mergeable:
                found.append((-score, vocab[left], vocab[right], (left, right)))
    return [pair for _, _, _, pair in sorted(found)]


def _unigram(pieces: Pieces) -> models.Unigram:
    unknown = pieces.types.index(PieceType.UNKNOWN) if PieceType.UNKNOWN in pieces.types else None
    has_bytes = PieceType.BYTE in pieces.types
    return models.Unigram(list(zip(pieces.texts, pieces.scores)), unk_id=unknown, byte_fallback=has_bytes)


def read_sentencepiece(path: Path) -> Pieces:
    """Reads a tokenizer.model: the few fields of sentencepiece's protobuf that say how text becomes
    pieces."""
    try:
        fields = list(_fields(path.read_bytes()))
        entries = [
            dict(_fields(value)) for number, value in fields if number == 1 and isinstance(value, bytes)
        ]
        trainer, normalizer = (dict(_fields(_bytes(dict(fields).get(number, b"")))) for number in (2, 3))
        texts = [_bytes(entry[1]).decode() for entry in entries]
        scores = [struct.unpack("<f", _bytes(entry.get(2, bytes(4))))[0] for entry in entries]
        types = [int(PieceType(_number(entry.get(3, PieceType.NORMAL)))) for entry in entries]
    except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        raise StartupError(
            f"{path} is not a sentencepiece model ({error!r}); give a folder with tokenizer.json by --tokenizer"
        ) from error
    if not texts:
        raise StartupError(
            f"{path} is not a sentencepiece model (no pieces); give a folder with tokenizer.json by --tokenizer"
        )
    return Pieces(
        texts, scores, types, adds_space=bool(normalizer.get(3, 1)), is_unigram=trainer.get(3, 1) == 1
    )


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
            raise ValueError(f"it is cut short at {at:,}")
        yield key >> 3, data[at : at + length]
        at += length
