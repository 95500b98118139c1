"""Text to tokens and back: one `Tokenizer` for Hugging Face folders and GGUF files.

HTTP code imports this module before the fork, so it must not import anything slow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers.pre_tokenizers import Metaspace, PreTokenizer

from levserve.errors import BadRequest, StartupError
from levserve.text.detokenizer import Detokenizer, Spelling, read_spelling
from levserve.text.hf_vocab import read_folder
from levserve.text.vocabulary import Vocabulary


class SpeltTokens(dict[int, bytes | None]):
    """The bytes of each token, computed on first use; if two threads do that at once they get the same value.

    A model may have more rows than its vocabulary has tokens; those ids have no text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, spelling: Spelling) -> None:
        self._backend = backend
        self._spelling = spelling

    def __missing__(self, token: int) -> bytes | None:
        text = self._backend.id_to_token(token)
        self[token] = spelt = None if text is None else self._spelling.spell(text)
        return spelt


class Tokenizer:
    """Encodes and decodes with one vocabulary. It never changes, so threads may share it.

    `special_tokens` are the strings of the control tokens, longest first. Decoding joins the bytes of the
    tokens; transformers also removes some spaces, which cannot be streamed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        backend = vocabulary.backend
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.bos_token = vocabulary.bos_token
        self.eos_token = vocabulary.eos_token
        self.pad_token = vocabulary.pad_token
        self.eos_ids = vocabulary.eos_ids
        self.chat_template = vocabulary.chat_template
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        specials = {entry.content for entry in added.values() if entry.special and entry.content}
        self.special_tokens = tuple(sorted(specials, key=lambda text: (-len(text), text)))
        self._plain = _without_special_tokens(backend)
        self._spelling = _spelling(backend)
        self._bytes = SpeltTokens(backend, self._spelling)
        self._visible_bytes = SpeltTokens(backend, self._spelling)
        for token, entry in added.items():
            spelt = self._spelling.spell_added(entry.content)
            self._bytes[token] = spelt
            self._visible_bytes[token] = None if entry.special else spelt

    @cached_property
    def longest_token(self) -> int:
        """The maximum number of characters that one token stands for."""
        return max(map(len, self.backend.get_vocab()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text in which the strings of special tokens stand for those tokens."""
        return _encode(self.backend, text, add_special_tokens=add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """The tokens of a span within a text; the strings of special tokens in it are ordinary text."""
        return _encode(self._plain, text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.add(tokens) + detokenizer.flush()

    def split_specials(self, text: str) -> list[str]:
        """The text in spans: the strings of special tokens, and what is between them, which may be empty."""
        specials = [re.escape(special) for special in self.special_tokens if special in text]
        return re.split(f"({'|'.join(specials)})", text) if specials else [text]

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, which may be part of a character; none for an id without a token."""
        return self._bytes[token] or b""

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """A new detokenizer; with `continues` its text follows a prompt and keeps its first space.

        The special tokens in `visible` are in the text even if the others are skipped.
        """

        def spell_visible(token: int) -> bytes | None:
            return (self._bytes if token in visible else self._visible_bytes)[token]

        spell: Callable[[int], bytes | None]
        if not skip_special_tokens:
            spell = self._bytes.__getitem__
        else:
            spell = spell_visible if visible else self._visible_bytes.__getitem__
        return Detokenizer(spell, self._spelling, continues=continues)


def load_tokenizer(path: Path, *, chat_template: str | None = None) -> Tokenizer:
    """Loads a Hugging Face folder or a .gguf file; `chat_template` replaces the model's own."""
    vocabulary = read_folder(path) if path.is_dir() else _read_file(path)
    return Tokenizer(replace(vocabulary, chat_template=chat_template or vocabulary.chat_template))


def _read_file(path: Path) -> Vocabulary:
    if path.suffix != ".gguf":
        problem = "is not a tokenizer" if path.exists() else "does not exist"
        raise StartupError(f"--tokenizer {path} {problem}; expected a Hugging Face folder or a .gguf file")
    from levserve.text.gguf_vocab import read_vocabulary  # imports numpy, which takes 0.2 s

    return read_vocabulary(path)


def _encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    if not is_unicode(text):
        raise BadRequest("The text contains half of a surrogate pair, which is not a character.")
    # The batch call releases the GIL and computes no offsets; `encode` held it for 7 s on a text of 5 MB.
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def is_unicode(text: str) -> bool:
    """Whether a string can be written as UTF-8: one from JSON may contain half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_special_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer that shares the vocabulary and treats the strings of special tokens as plain text."""
    plain = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = _inside_text(backend.pre_tokenizer)
    plain.add_tokens([entry for _, entry in sorted(backend.get_added_tokens_decoder().items())])
    plain.encode_special_tokens = True
    return plain


def _inside_text(pre_tokenizer: PreTokenizer) -> PreTokenizer:
    """The pre-tokenizer for a span within a text, which gets no first space."""
    if isinstance(pre_tokenizer, Metaspace) and pre_tokenizer.prepend_scheme == "first":
        return Metaspace(pre_tokenizer.replacement, prepend_scheme="never", split=pre_tokenizer.split)
    return pre_tokenizer


def _spelling(backend: tokenizers.Tokenizer) -> Spelling:
    # The pickled decoder is its part of tokenizer.json; writing the whole file takes a second if it is large.
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    return read_spelling(decoder)
