"""Other servers' names for our settings, so that users of those servers can type what they know.

A name in capitals is an environment variable; any other is a flag and a key of the settings file. A flag or a
key is as good as the setting's own. A variable of another server overrides the file, and our own variables
and all flags override it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from levserve.errors import ConfigError
from levserve.settings.kind import SWITCH, Setting

FROM_FLAG, FROM_VARIABLE, FROM_OTHER_VARIABLE, FROM_EMPTY_VARIABLE, FROM_FILE = 4, 3, 2, 1, 0
"""The precedence of a source; the highest wins. An empty variable of ours yields to another server's."""
BUCKET, PREFIX = "GCS_BUCKET", "GCS_MODEL_PREFIX"
DEFAULT_PREFIX = "models/"


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for a setting.

    `translate` turns the alias's text into the setting's text, or into None if it says nothing about the
    setting. An alias that `is_weak` applies only if the setting is not given in any other way.
    """

    name: str
    setting: str
    translate: Callable[[str], str | None] = str
    is_weak: bool = False

    @property
    def is_variable(self) -> bool:
        return self.name.isupper()

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def dest(self) -> str:
        """Its attribute in the parsed options; the space keeps it apart from the names of settings."""
        return f"alias {self.name}"


class Given(NamedTuple):
    """One value that was given for a setting, with the name it was given under and its source."""

    name: str
    text: str
    source: str
    strength: int
    alias: Alias | None = None


def _if_on(value: str, otherwise: str | None = None) -> Callable[[str], str | None]:
    """A translation of a switch: `value` if it is on, `otherwise` if it is off."""
    return lambda text: value if SWITCH.read(text) else otherwise


ALIASES = (
    Alias("model-path", "model"),
    Alias("tokenizer-path", "tokenizer"),
    Alias("model-id", "model"),
    Alias("alias", "served_model_name", lambda text: text.replace(",", " ")),
    Alias("tensor-parallel-size", "tensor_parallel"),
    Alias("tp-size", "tensor_parallel"),
    Alias("max-context-length", "max_seq_len"),
    Alias("context-window", "max_seq_len"),
    Alias("max-model-len", "max_seq_len"),
    Alias("ctx-size", "max_seq_len"),
    Alias("context-length", "max_seq_len"),
    Alias("max-batch-seqs", "max_running"),
    Alias("max-batch-size", "max_running"),
    Alias("max-num-seqs", "max_running"),
    Alias("max-running-requests", "max_running"),
    Alias("parallel", "max_running"),
    Alias("max-queue-tokens", "max_inflight_tokens"),
    Alias("max-num-batched-tokens", "prefill_chunk"),
    Alias("chunked-prefill-size", "prefill_chunk"),
    Alias("block-size", "page_size"),
    Alias("kv-cache-dtype", "kv_dtype"),
    Alias("quantization", "quantize"),
    Alias("download-dir", "cache_dir"),
    Alias("enable-cors", "cors_origins", _if_on("*", otherwise=""), is_weak=True),
    Alias("LEVANTER_API_KEY", "api_key"),
    Alias("PORT", "port"),
    Alias(BUCKET, "models_dir"),
    Alias(BUCKET, "model_store"),
    Alias(BUCKET, "lazy", lambda text: "true", is_weak=True),  # that server loads models on request
    Alias("LOCAL_MODEL_CACHE", "cache_dir"),
    Alias("MAX_CACHED_MODELS", "max_loaded_models"),
    Alias("MAX_CONCURRENT_REQUESTS", "max_running"),
    Alias("REQUEST_TIMEOUT", "request_timeout"),
    Alias("DEFAULT_MAX_TOKENS", "default_max_tokens"),
    Alias("DEFAULT_TEMPERATURE", "default_temperature"),
    Alias("LOCAL_DEV", "max_running", _if_on("1"), is_weak=True),
    Alias("LOCAL_DEV", "quantize", _if_on("int8"), is_weak=True),
    Alias("AIOS_MODEL_PATH", "model"),
    Alias("AIOS_TOKENIZER_PATH", "tokenizer"),
    Alias("AIOS_DEVICE", "device"),
    Alias("AIOS_MAX_BATCH_SIZE", "max_running"),
    Alias("AIOS_MAX_NEW_TOKENS", "max_new_tokens"),
    Alias("AIOS_CORS_ORIGINS", "cors_origins"),
)
FLAG_ALIASES = {alias.name: alias for alias in ALIASES if not alias.is_variable}
VARIABLE_ALIASES = tuple(alias for alias in ALIASES if alias.is_variable)
SWITCH_ALIASES = ("enable-cors",)
"""Aliases whose flag may stand alone, which means true."""
OTHER_MODELS = ("hf_checkpoint", "checkpoint_path")
"""Other settings that name a model; they override another server's variable for `model`."""


def names_of(setting: str) -> list[str]:
    """The other names of a setting, as help and documentation show them."""
    return [alias.name if alias.is_variable else alias.flag for alias in ALIASES if alias.setting == setting]


def translate(alias: Alias, text: str, source: str) -> str | None:
    """The setting's text; raises `ConfigError` for a text that the alias does not accept."""
    try:
        return alias.translate(text)
    except (ValueError, KeyError):
        name = alias.name if alias.is_variable else alias.flag
        raise ConfigError(f"{name} must be {SWITCH.words}, not {text!r} ({source})") from None


def variables_given(environ: Mapping[str, str], describe: Callable[[str], str]) -> dict[str, list[Given]]:
    """The values in other servers' variables, by setting; `describe` says where a variable comes from."""
    found: dict[str, list[Given]] = {}
    for alias in VARIABLE_ALIASES:
        text = environ.get(alias.name, "")
        if alias.name == BUCKET and text:
            text = _bucket_address(text, environ.get(PREFIX, DEFAULT_PREFIX))
        if not text:  # compose files and units pass unset variables on as empty ones
            continue
        source = describe(alias.name)
        translated = translate(alias, text, source)
        if translated is not None:
            given = Given(alias.name, translated, source, FROM_OTHER_VARIABLE, alias)
            found.setdefault(alias.setting, []).append(given)
    return found


def choose(setting: Setting, given: Sequence[Given]) -> Given:
    """The value that applies; raises `ConfigError` if two of the same strength differ."""
    firm = [one for one in given if one.alias is None or not one.alias.is_weak]
    best = max(firm or given, key=lambda one: one.strength)
    for one in given:
        is_equal = one.strength == best.strength and one in firm
        is_contradiction = not one.text and one not in firm  # --enable-cors false beside --cors-origins
        if (is_equal or is_contradiction) and one.text != best.text:
            shown = [f"{each.name} {_show(setting, each)} ({each.source})" for each in (best, one)]
            raise ConfigError(
                f"{shown[0]} and {shown[1]} are two names of one setting with different values; "
                "give only one of them"
            )
    return best


def note(setting: Setting, one: Given, chosen: Given) -> str:
    """A sentence for the log about a value that was given under another server's name."""
    meaning = f"{setting.flag} {_show(setting, one)}"
    if one.text == chosen.text:
        return f"{one.name} is taken as {meaning}"
    winner = f"{chosen.name} {_show(setting, chosen)} ({chosen.source})"
    return f"{one.name}, which means {meaning}, is overridden by {winner}"


def _show(setting: Setting, given: Given) -> str:
    return "***" if setting.secret else given.text or "(empty)"


def _bucket_address(bucket: str, prefix: str) -> str:
    bucket = bucket.removeprefix("gs://").strip("/")
    return f"gs://{bucket}/{prefix.strip('/')}".rstrip("/")
