"""Reads the tokenizer of a Hugging Face folder from its tokenizer.json, or else from its tokenizer.model.

The result is the same as with transformers. Importing transformers takes a second of CPU time, so it is
used only for folders that have neither file.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from levserve.errors import StartupError, cause_of
from levserve.text.sentencepiece import build_sentencepiece, read_sentencepiece
from levserve.text.vocabulary import Vocabulary

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("*token*", "vocab*", "*.model")
"""Every folder with a tokenizer has a file with such a name."""
_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def read_folder(path: Path) -> Vocabulary:
    try:
        if (path / "tokenizer.json").exists():
            return _read_tokenizer_json(path)
        if (path / "tokenizer.model").exists():
            return _read_tokenizer_model(path)
        if not any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES):
            raise StartupError(
                f"{path}: the folder has no tokenizer; give one from elsewhere with --tokenizer"
            )
        return _read_with_transformers(path)
    except StartupError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        reason = cause_of(error).strip().partition("\n")[0]
        raise StartupError(f"{path}: cannot read the tokenizer: {reason}") from error


def _read_tokenizer_json(path: Path) -> Vocabulary:
    """The file alone defines how text is split; older fields such as `add_bos_token` are ignored."""
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    config = _read_config(path, backend)
    _add_tokens(backend, config)
    return _describe(path, backend, config)


def _read_tokenizer_model(path: Path) -> Vocabulary:
    backend = build_sentencepiece(read_sentencepiece(path / "tokenizer.model"))
    config = {"bos_token": "<s>", "eos_token": "</s>", **_read_config(path, backend)}
    _add_tokens(backend, config, normalized=False)  # a normalized token would be found only after a space
    bos = _find_named(backend, config, "bos_token")
    if bos is not None and config.get("add_bos_token", True):
        special_tokens = [(bos, backend.token_to_id(bos))]
        backend.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=special_tokens)
    return _describe(path, backend, config)


def _read_with_transformers(path: Path) -> Vocabulary:
    """Reads any other folder that transformers knows, such as one with vocab.json and merges.txt."""
    logging.getLogger("transformers").addFilter(_is_not_torch_notice)
    from transformers import AutoTokenizer  # here, because it takes a second

    found = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if not found.is_fast:
        problem = f"{type(found).__name__} cannot be converted to tokenizer.json"
        raise StartupError(f"{path}: {problem}; give another folder with --tokenizer")
    config = found.special_tokens_map | {"chat_template": found.chat_template}
    return _describe(path, found.backend_tokenizer, config)


def _is_not_torch_notice(record: logging.LogRecord) -> bool:
    """Suppresses transformers' message that PyTorch is missing, which is not needed here."""
    return "PyTorch was not found" not in record.getMessage()


def _read_config(path: Path, backend: Tokenizer) -> dict[str, Any]:
    """tokenizer_config.json, and two other files that transformers wrote before version 4.34."""
    config = _read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    missing = {}
    for text, token in _read_json(path / "added_tokens.json").items():
        if backend.token_to_id(text) is None:
            missing[token] = {"content": text}
    return {**config, **_read_json(path / "special_tokens_map.json"), "added_tokens_decoder": missing}


def _add_tokens(backend: Tokenizer, config: dict[str, Any], **changes: bool) -> None:
    """Adds the tokens that the configuration lists, and marks as special those that it names as such.

    A special token that is not in the vocabulary is left out, because the model has no row for it.
    """
    tokens = {token.content: token for _, token in sorted(backend.get_added_tokens_decoder().items())}
    for _, entry in sorted(config["added_tokens_decoder"].items(), key=lambda item: int(item[0])):
        token = _read_token(entry, **changes)
        tokens[token.content] = token
    for entry in _find_special(config):
        token = _read_token(entry, special=True, **changes)
        if token.content in tokens:
            tokens[token.content].special = True
        elif backend.token_to_id(token.content) is not None:
            tokens[token.content] = token
    backend.add_tokens(list(tokens.values()))


def _find_special(config: dict[str, Any]) -> list[str | dict[str, Any]]:
    """The special tokens: those with their own key, such as `eos_token`, and those in a list."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        extra = extra.values()
    named = [value for key, value in config.items() if key.endswith("_token")]
    return [entry for entry in (*named, *extra) if isinstance(entry, str | dict)]


def _read_token(entry: Any, **changes: bool) -> AddedToken:
    """A token, which may be written as a string or as an object with further fields."""
    fields = entry if isinstance(entry, dict) else {"content": entry}
    if not isinstance(fields.get("content"), str):
        raise ValueError(f"{entry!r} is not a token")
    given = {name: fields[name] for name in _TOKEN_FIELDS if name in fields}
    return AddedToken(**given | changes)


def _find_named(backend: Tokenizer, config: dict[str, Any], name: str) -> str | None:
    """The text of a token such as `bos_token`; None if there is none or it is not in the vocabulary."""
    if config.get(name) is None:
        return None
    text = _read_token(config[name]).content
    return None if backend.token_to_id(text) is None else text


def _describe(path: Path, backend: Tokenizer, config: dict[str, Any]) -> Vocabulary:
    eos = _find_named(backend, config, "eos_token")
    eos_ids = _configured_eos(path, backend.get_vocab_size())
    if eos is not None and (eos_id := backend.token_to_id(eos)) is not None:
        eos_ids.add(eos_id)
    return Vocabulary(
        backend=backend,
        bos_token=_find_named(backend, config, "bos_token"),
        eos_token=eos,
        pad_token=_find_named(backend, config, "pad_token"),
        eos_ids=frozenset(eos_ids),
        chat_template=_find_template(path, config.get("chat_template")),
    )


def _find_template(path: Path, configured: object) -> str | None:
    """The folder's chat template, from its own file or else from the configuration.

    If there are several, it is the default one.
    """
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template: object = _read_json(path / "chat_template.json").get("chat_template", configured)
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise StartupError(f"{path}: chat_template is not a string")
    return template


def _configured_eos(path: Path, num_tokens: int) -> set[int]:
    """The tokens that end generation according to the model's configuration; -1 stands for none."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        config = _read_json(path / name)
        num_rows = config.get("vocab_size")
        if isinstance(num_rows, int):
            num_tokens = max(num_tokens, num_rows)
        eos = config.get("eos_token_id")
        for token in eos if isinstance(eos, list) else [eos]:
            if token is None or token == -1:
                continue
            if isinstance(token, bool) or not isinstance(token, int):
                raise StartupError(
                    f"{path / name}: eos_token_id = {eos!r} is not a token or a list of tokens"
                )
            if 0 <= token < num_tokens:
                found.add(token)
            else:
                log.warning("%s: eos_token_id %d is ignored: there is no such token", path / name, token)
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file does not exist."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise StartupError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path}: not a JSON object")
    return content
