"""Builds a tokenizer from the vocabulary in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from levserve.errors import StartupError
from levserve.gguf.header import read_header
from levserve.text.sentencepiece import Pieces, PieceType, added_tokens, build_sentencepiece
from levserve.text.vocabulary import Vocabulary

# llama.cpp also stops at tokens with these names, because many files list only one of their end tokens.
_END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)
_NO_TOKEN = (-1, 2**32 - 1)  # the number that llama.cpp writes for a token that a model does not have
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_HINT = "give the model's own tokenizer with --tokenizer"

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SHORT|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SHORT"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O_WORDS = _CASED_WORDS.replace("SHORT", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _AFTER_WORDS
_TEKKEN_WORDS = _CASED_WORDS.replace("SHORT", "") + r"|\p{N}" + _AFTER_WORDS

_DEEPSEEK_WORDS = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)
_DEEPSEEK3_WORDS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How the `tokenizer.ggml.pre` of a file splits text, as in the model's tokenizer.json."""

    words: pre_tokenizers.PreTokenizer
    ignores_merges: bool = False  # a word that is a token is not merged from its parts
    is_nfc: bool = False
    adds_bos: bool = False  # if the file does not say


def read_vocabulary(path: Path) -> Vocabulary:
    metadata = read_header(path).metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind not in ("gpt2", "llama"):
        problem = f"GGUF vocabulary {kind!r} is not supported (gpt2 and llama are)"
        raise StartupError(f"{path}: {problem}; {_HINT}")
    splitting = None if kind == "llama" else _splittings().get(str(pre))
    if kind == "gpt2" and splitting is None:
        raise StartupError(f"{path}: GGUF pre-tokenizer {pre!r} is not supported; {_HINT}")
    try:
        return _build_vocabulary(metadata, splitting)
    except ValueError as error:
        raise StartupError(f"{path}: the vocabulary in this file cannot be used: {error}") from error
    except Exception as error:  # tokenizers raises bare Exception if the merges do not fit the vocabulary
        raise StartupError(f"{path}: the vocabulary in this file cannot be used: {error!r}") from error


def _build_vocabulary(metadata: Mapping[str, Any], splitting: _Splitting | None) -> Vocabulary:
    """A vocabulary without a splitting is sentencepiece's."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]

    def numbered(key: str) -> int | None:
        token = metadata.get(f"tokenizer.ggml.{key}")
        if token is None or token in _NO_TOKEN:
            return None
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise ValueError(f"tokenizer.ggml.{key} = {token!r} is not one of {len(tokens)} tokens")
        return token

    def named(key: str) -> str | None:
        token = numbered(key)
        return None if token is None else tokens[token]

    if splitting is None:
        adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        pieces = Pieces(tokens, metadata["tokenizer.ggml.scores"], types, adds_space)
        backend = build_sentencepiece(pieces, strips_after=metadata.get("general.architecture") == "phi3")
    else:
        backend = _build_backend(tokens, types, metadata["tokenizer.ggml.merges"], splitting)
    bos_token = named("bos_token_id")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", splitting is None or splitting.adds_bos)
    if bos_token is not None and adds_bos:
        bos = (bos_token, numbered("bos_token_id"))
        backend.post_processor = processors.TemplateProcessing(single=[bos_token, "$A"], special_tokens=[bos])
    ends = {numbered(key) for key in _END_KEYS}
    for token, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if text in _END_TOKENS and kind in (PieceType.CONTROL, PieceType.USER_DEFINED):
            ends.add(token)
    return Vocabulary(
        backend=backend,
        bos_token=bos_token,
        eos_token=named("eos_token_id"),
        pad_token=named("padding_token_id"),
        eos_ids=frozenset(token for token in ends if token is not None),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _build_backend(
    tokens: list[str], types: list[int], merges: list[str], splitting: _Splitting
) -> Tokenizer:
    vocab = {text: token for token, text in enumerate(tokens)}
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    backend = Tokenizer(models.BPE(vocab, pairs, ignore_merges=splitting.ignores_merges))
    if splitting.is_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitting.words
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added_tokens(tokens, types))
    return backend


def _splittings() -> dict[str, _Splitting]:
    gpt2 = _Splitting(_byte_level(use_regex=True))
    llama3 = _Splitting(_split(_LLAMA3_WORDS), ignores_merges=True, adds_bos=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "default": gpt2,
        "gpt-2": gpt2,
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "dbrx": _Splitting(_split(_LLAMA3_WORDS)),  # phi-4 and OLMo 2
        "glm4": _Splitting(_split(_LLAMA3_WORDS)),
        "chatglm-bpe": _Splitting(_split(_LLAMA3_WORDS)),
        "deepseek-llm": _Splitting(_split(*_DEEPSEEK_WORDS, more=[digits])),
        "deepseek-v3": _Splitting(_split(*_DEEPSEEK3_WORDS)),
        "olmo": gpt2,
        "gpt-4o": _Splitting(_split(_GPT4O_WORDS)),  # Phi-4-mini
        "tekken": _Splitting(_split(_TEKKEN_WORDS), ignores_merges=True, adds_bos=True),  # Mistral since Nemo
        "qwen2": _Splitting(_split(_QWEN2_WORDS), is_nfc=True),
        "deepseek-r1-qwen": _Splitting(_split(_QWEN2_WORDS), is_nfc=True),
        "smollm": _Splitting(pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])),
    }


def _split(*words: str, more: Sequence[pre_tokenizers.PreTokenizer] = ()) -> pre_tokenizers.PreTokenizer:
    """Splits text by one expression after another, then by what is in `more`."""
    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in words]
    return pre_tokenizers.Sequence([*splits, *more, _byte_level(use_regex=False)])


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
