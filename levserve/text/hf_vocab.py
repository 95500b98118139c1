"""Reads the tokenizer of a Hugging Face folder: its tokenizer.json, else its sentencepiece tokenizer.model.

Called once while loading. Makes of these files what transformers makes of them. Importing it would cost a
second of processor time, so it is asked only for folders that have neither.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from levserve.errors import StartupError
from levserve.text.sentencepiece import build_sentencepiece, read_sentencepiece
from levserve.text.vocabulary import Vocabulary

_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def read_folder(path: Path) -> Vocabulary:
    try:
        if (path / "tokenizer.json").exists():
            return _read_tokenizer_json(path)
        if (path / "tokenizer.model").exists():
            return _read_tokenizer_model(path)
        return _read_with_transformers(path)
    except StartupError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        reason = str(error).strip().partition("\n")[0]
        raise StartupError(f"{path}: the tokenizer cannot be read: {reason}") from error


def _read_tokenizer_json(path: Path) -> Vocabulary:
    """The file alone says how text is split; `add_bos_token` and similar older fields are not used."""
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    config = _read_config(path, backend)
    _add_tokens(backend, config)
    return _describe(path, backend, config)


def _read_tokenizer_model(path: Path) -> Vocabulary:
    backend = build_sentencepiece(read_sentencepiece(path / "tokenizer.model"))
    config = {"bos_token": "<s>", "eos_token": "</s>", **_read_config(path, backend)}
    _add_tokens(backend, config, normalized=False)  # normalized, a token would be found only after a space
    bos = _find_named(backend, config, "bos_token")
    if bos is not None and config.get("add_bos_token", True):
        backend.post_processor = TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return _describe(path, backend, config)


def _read_with_transformers(path: Path) -> Vocabulary:
    """A folder with vocab.json and merges.txt, tekken.json, or whatever else it knows."""
    logging.getLogger("transformers").addFilter(_is_not_torch_notice)
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if not found.is_fast:
        raise StartupError(
            f"{path}: {type(found).__name__} has no tokenizer.json form; give another folder with --tokenizer"
        )
    return _describe(
        path, found.backend_tokenizer, found.special_tokens_map | {"chat_template": found.chat_template}
    )


def _is_not_torch_notice(record: logging.LogRecord) -> bool:
    """Silences the message of transformers' import that torch is missing: it is not needed."""
    return "PyTorch was not found" not in record.getMessage()


def _read_config(path: Path, backend: Tokenizer) -> dict[str, Any]:
    """tokenizer_config.json, and what transformers kept in two other files before version 4.34."""
    config = _read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    added = {token: {"content": text} for text, token in _read_json(path / "added_tokens.json").items()}
    missing = {
        token: entry for token, entry in added.items() if backend.token_to_id(entry["content"]) is None
    }
    return {**config, **_read_json(path / "special_tokens_map.json"), "added_tokens_decoder": missing}


def _add_tokens(backend: Tokenizer, config: dict[str, Any], **changes: bool) -> None:
    """Adds the tokens that the configuration lists, and makes those special that it names as such.

    A name the vocabulary does not have is left out: a token made for it would have no row in the model.
    """
    listed = sorted(config["added_tokens_decoder"].items(), key=lambda item: int(item[0]))
    tokens = {token.content: token for _, token in sorted(backend.get_added_tokens_decoder().items())}
    tokens |= {token.content: token for token in (_read_token(entry, **changes) for _, entry in listed)}
    for token in (_read_token(entry, special=True, **changes) for entry in _find_special(config)):
        if token.content in tokens:
            tokens[token.content].special = True
        elif backend.token_to_id(token.content) is not None:
            tokens[token.content] = token
    backend.add_tokens(list(tokens.values()))


def _find_special(config: dict[str, Any]) -> list[str | dict[str, Any]]:
    """Tokens with a name of their own, as `eos_token` and `image_token` are, and those without."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [value for key, value in config.items() if key.endswith("_token")]
    entries = [*named, *(extra.values() if isinstance(extra, dict) else extra)]
    return [entry for entry in entries if isinstance(entry, str | dict)]


def _read_token(entry: Any, **changes: bool) -> AddedToken:
    """A token, which is stored as a string or as an object with more fields."""
    fields = entry if isinstance(entry, dict) else {"content": entry}
    if not isinstance(fields.get("content"), str):
        raise ValueError(f"{entry!r} is no token")
    return AddedToken(**{name: fields[name] for name in _TOKEN_FIELDS if name in fields} | changes)


def _find_named(backend: Tokenizer, config: dict[str, Any], name: str) -> str | None:
    text = None if config.get(name) is None else _read_token(config[name]).content
    return None if text is None or backend.token_to_id(text) is None else text


def _describe(path: Path, backend: Tokenizer, config: dict[str, Any]) -> Vocabulary:
    bos, eos, pad = (_find_named(backend, config, name) for name in ("bos_token", "eos_token", "pad_token"))
    ends = {*_configured_eos(path), None if eos is None else backend.token_to_id(eos)}
    return Vocabulary(
        backend=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        eos_ids=frozenset(token for token in ends if token is not None),
        chat_template=_find_template(path, config.get("chat_template")),
    )


def _find_template(path: Path, configured: object) -> str | None:
    """The folder's chat template: its own file before the tokenizer's configuration; the default one of
    several."""
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template: object = _read_json(path / "chat_template.json").get("chat_template", configured)
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise StartupError(f"{path}: chat_template is not a text")
    return template


def _configured_eos(path: Path) -> set[int]:
    """The tokens that end generation as the model's configuration has them."""
    return set().union(
        *(_eos_in(_read_json(path / name)) for name in ("config.json", "generation_config.json"))
    )


def _eos_in(config: dict[str, Any]) -> set[int]:
    eos = config.get("eos_token_id")
    return set(eos) if isinstance(eos, list) else set() if eos is None else {eos}


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise StartupError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path}: not a JSON object")
    return content
