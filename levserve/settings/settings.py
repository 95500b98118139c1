"""Every setting of the server, declared once, as a field of `Settings`.

A field gives its flag (`--max-running`), its key in the ini file (`max-running` under its section), its environment
variable (`LEVSERVE_MAX_RUNNING`), its lines in `--help` and its row in README's table. `options.py` reads what was given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from levserve.settings.setting import (
    ENV_PREFIX,
    NAME,
    ORIGINS,
    PATH,
    SEED,
    SWITCH,
    TEMPERATURE,
    TEXT,
    Setting,
    integer,
    one_of,
    real,
    setting,
    size,
)

FAULTS_VARIABLE = (
    f"{ENV_PREFIX}FAULTS"  # for tests, so neither a flag nor a key of the file; see engine/faults.py
)
KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"
OTHER_KEY_VARIABLE = "LEVANTER_API_KEY"  # what Levanter's own server reads
SECTIONS = {
    "server": "where it listens and who may call",
    "model": "what it serves",
    "engine": "how it runs on the device",
    "limits": "what it refuses",
    "log": "what it tells",
}
MODEL_SECTION = "model."
"""[model.NAME] is one of several models; what it does not set of SHARED_SETTINGS it has from [model] and the others."""
OWN_SETTINGS = (
    "model",
    "hf_checkpoint",
    "checkpoint_path",
    "model_config",
    "revision",
    "tokenizer",
    "chat_template",
    "served_model_name",
)
SHARED_SETTINGS = (
    "model_store",
    "dtype",
    "quantize",
    "max_seq_len",
    "load",
    "kv_dtype",
    "kv_memory",
    "kv_pages",
)


class Described(NamedTuple):
    """One setting of a running server, fit for a log: secrets are masked."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator asked for; 0 and empty stand for "sized from the machine" where the help says so.

    `sources` names the origin of every value that is not a default; `file_keys` and `admin_file_keys` are what the key files
    hold. Made by `parse_settings`, which checks; a test may make its own.
    """

    host: str = setting("server", NAME, "127.0.0.1", "Address to listen on.")
    port: int = setting("server", integer(0, 65535), 8000, "Port to listen on; 0 lets the system choose.")
    api_key: str = setting(
        "server",
        TEXT,
        "",
        f"Bearer key that clients must send, else ${OTHER_KEY_VARIABLE}; no key lets everyone in.",
        secret=True,
    )
    api_key_file: str = setting(
        "server", PATH, "", "File with more keys that let in, one a line; # begins a comment."
    )
    admin_key: str = setting(
        "server", TEXT, "", "Bearer key of the /admin endpoints; with no admin key they are off.", secret=True
    )
    admin_key_file: str = setting(
        "server", PATH, "", "File with more admin keys, one a line; # begins a comment."
    )
    open_metrics: bool = setting("server", SWITCH, False, "Let /metrics be read without a key.")
    cors_origins: tuple[str, ...] = setting(
        "server", ORIGINS, (), "Origins whose web pages may call; empty: none, *: all."
    )
    drain_seconds: float = setting(
        "server", real(0), 30.0, "How long running requests may go on after SIGTERM."
    )
    keep_alive: float = setting(
        "server",
        real(0),
        75.0,
        "Seconds that an idle connection is kept; longer than the proxy in front keeps it (nginx: 60).",
    )
    sse_heartbeat: float = setting(
        "server", real(0), 15.0, "Seconds between comment lines that keep a waiting stream alive; 0: none."
    )

    model: str = setting(
        "model",
        NAME,
        "smollm2-135m",
        "Bundled name, Hugging Face folder, .gguf file, org/name on the hub, or gs://, s3://, http(s)://.",
    )
    hf_checkpoint: str = setting("model", PATH, "", "Another name for --model; give one of them.")
    checkpoint_path: str = setting(
        "model", PATH, "", "Levanter checkpoint, or folder of them (the newest), in place of --model."
    )
    model_config: str = setting(
        "model",
        PATH,
        "",
        "The Levanter run's config.yaml; empty: in the checkpoint or up to two folders above.",
    )
    model_store: str = setting(
        "model", PATH, "", "Folder or address where --model names are looked up; org/name is org-name there."
    )
    revision: str = setting("model", TEXT, "", "Branch, tag or commit on the hub; empty: the main branch.")
    tokenizer: str = setting(
        "model", PATH, "", "Folder, .gguf file or hub name of a tokenizer to use in place of the model's own."
    )
    chat_template: str = setting(
        "model", PATH, "", "Jinja file to use in place of the model's own chat template."
    )
    served_model_name: str = setting("model", TEXT, "", "Name that /v1/models tells; empty: the model's own.")
    dtype: str = setting(
        "model", one_of("auto", "float32", "bfloat16"), "auto", "Number format to compute in."
    )
    quantize: str = setting(
        "model",
        one_of("auto", "none", "int8", "fp8"),
        "auto",
        "Matrices in eight bits, fp8 on GPUs only; auto: int8 on a CPU if the file has no more than that and --dtype is not given.",
    )
    max_seq_len: int = setting(
        "model",
        integer(0),
        0,
        "Most tokens in prompt and answer; 0: the model's own limit, or what memory allows.",
    )
    default_max_tokens: int = setting(
        "model",
        integer(0),
        0,
        "Tokens for a request that names no limit; 0: OpenAI's, 16 for a completion, all that fit for a chat.",
    )
    default_temperature: float | None = setting(
        "model", TEMPERATURE, None, "For a request that names none; empty: OpenAI's, which is 1."
    )
    models_dir: str = setting(
        "model", PATH, "", "Folder, or address, of which every model can be asked for by its name."
    )
    load: str = setting(
        "model",
        one_of("first-use", "start"),
        "first-use",
        "When one of several models is loaded; the default one is at the start.",
    )
    cache_dir: str = setting(
        "model",
        PATH,
        "",
        "Where downloads and compiled programs are kept; empty: $XDG_CACHE_HOME/levserve or ~/.cache/levserve.",
    )
    cache_size: int = setting(
        "model", size(0), 0, "Most that models fetched from stores may take in the cache; 0: no limit."
    )

    device: str = setting("engine", one_of("auto", "cpu", "gpu", "tpu"), "auto", "Kind of device to run on.")
    max_running: int = setting(
        "engine", integer(0), 0, "Requests decoded together (rows); 0: sized from the machine."
    )
    page_size: int = setting(
        "engine", one_of(4, 8, 16, 32, 64, 128, 256), 32, "Tokens in one page of the KV cache."
    )
    kv_dtype: str = setting(
        "engine",
        one_of("auto", "bfloat16", "fp8"),
        "auto",
        "Number format of the KV cache; auto: --dtype's; fp8 holds twice the tokens.",
    )
    kv_memory: int = setting("engine", size(0), 0, "Memory for the KV cache; 0: sized from the machine.")
    kv_pages: int = setting(
        "engine", integer(0), 0, "Pages of the KV cache, instead of --kv-memory; 0: sized from the machine."
    )
    models_memory: int = setting(
        "engine", size(0), 0, "Most that several models may take, weights and KV; 0: 9/10 of what is free."
    )
    max_loaded_models: int = setting(
        "engine", integer(0), 0, "Most models loaded at a time; 0: as many as there is memory for."
    )
    round_steps: int = setting(
        "engine", integer(0), 0, "Decode steps in one device round; 0: 1 on CPU, 8 on an accelerator."
    )
    speculate: int = setting(
        "engine",
        integer(0, 15),
        0,
        "Tokens drafted from what was said before and checked in one step, where that is faster; 0: none.",
    )
    prefill_chunk: int = setting(
        "engine", integer(0), 0, "Most prompt tokens in a device call; 0: 128 on CPU, 4096 on an accelerator."
    )
    inter_token_goal_ms: float = setting(
        "engine",
        real(1),
        100.0,
        "Milliseconds that a running stream may wait for other requests' prompts in one round.",
    )
    seed: int | None = setting(
        "engine", SEED, None, "Base of the seeds of requests that bring none; empty: fresh entropy."
    )
    compile_cache: bool = setting(
        "engine", SWITCH, True, "Keep compiled programs on disk for the next start."
    )

    max_waiting: int = setting(
        "limits", integer(0), 0, "Requests that may wait for a row; 0: four times the rows."
    )
    max_inflight_tokens: int = setting(
        "limits",
        integer(0),
        0,
        "Tokens (prompt and max_tokens) of all that run or wait; 0: sized from the KV cache and the queue.",
    )
    max_body_bytes: int = setting("limits", size(1), 4 * 2**20, "Largest request body or WebSocket message.")
    max_sockets: int = setting(
        "limits", integer(0), 16, "WebSockets open at a time; each holds a thread of its own."
    )
    request_timeout: float = setting(
        "limits", real(0), 600.0, "Seconds that a request may take; 0 for no limit."
    )
    header_timeout: float = setting("limits", real(0.1), 10.0, "Seconds until a request's head must be here.")
    body_timeout: float = setting(
        "limits", real(0.1), 30.0, "Seconds from a request's head to the end of its body."
    )
    send_timeout: float = setting(
        "limits", real(0.1), 30.0, "Seconds that a client may take none of what it is sent."
    )
    stall_seconds: float = setting(
        "limits",
        real(0),
        30.0,
        "Seconds that the device may have work and not move before the server counts as stalled; 0: never.",
    )

    log_level: str = setting(
        "log", one_of("debug", "info", "warning", "error"), "info", "Least severity that is logged."
    )
    log_format: str = setting(
        "log", one_of("text", "json"), "text", "Lines for people, or one JSON object a line."
    )
    vllm_metrics: bool = setting(
        "log", SWITCH, False, "Export metrics under vLLM's names too, for dashboards made for it."
    )
    tracing: str = setting(
        "log", one_of("off", "otlp", "console"), "off", "Where OpenTelemetry spans go; OTEL_ variables apply."
    )

    models: Mapping[str, Settings] = field(default_factory=dict)
    """Of the sections [model.NAME], by the name that requests call the model."""
    dry_run: bool = False
    faults: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    file_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_file_keys: tuple[str, ...] = field(default=(), repr=False)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Every key that lets in; none lets everyone in."""
        return (self.api_key, *self.file_keys) if self.api_key else self.file_keys

    @property
    def admin_keys(self) -> tuple[str, ...]:
        """Every key that lets in to /admin; none closes it."""
        return (self.admin_key, *self.admin_file_keys) if self.admin_key else self.admin_file_keys

    @property
    def has_several(self) -> bool:
        """Whether requests may choose between models."""
        return bool(self.models or self.models_dir)

    def for_model(self, name: str, **own: Any) -> Settings:
        """The settings of one of several models: nothing that was meant for another model, and what is given here."""
        fresh = {s.name: s.default for s in SETTINGS if s.name in OWN_SETTINGS}
        return replace(self, **{**fresh, "served_model_name": name, **own, "models": {}, "models_dir": ""})

    @property
    def cache_path(self) -> Path:
        if self.cache_dir:
            return Path(self.cache_dir)
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (
            base if base.is_absolute() else Path.home() / ".cache"
        ) / "levserve"  # XDG: a relative path is to be ignored

    def describe(self) -> list[Described]:
        """Every setting in order of declaration, with its source: "default", "command line", "environment X" or "file PATH"."""
        return [
            Described(s.name, s.show(getattr(self, s.name)), self.sources.get(s.name, "default"))
            for s in SETTINGS
        ]


SETTINGS = tuple(Setting(f.name, f.default, **f.metadata) for f in fields(Settings) if f.metadata)
BY_KEY = {s.key: s for s in SETTINGS}


def settings_table() -> str:
    """README's table of the settings, in Markdown."""
    lines = ["| option | environment | value | default | meaning |", "|---|---|---|---|---|"]
    for section, title in SECTIONS.items():
        lines.append(f"| **`[{section}]`** | | | | *{title}* |")
        for s in settings_of(section):
            lines.append(
                f"| `{s.flag}` | `{s.variable}` | {s.kind.words} | `{s.show(s.default)}` | {s.help} |"
            )
    return "\n".join(lines) + "\n"


def settings_of(section: str) -> list[Setting]:
    return [s for s in SETTINGS if s.section == section]
