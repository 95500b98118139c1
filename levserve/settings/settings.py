"""Every setting of the server, each declared once, as a field of `Settings`.

The field gives the setting its flag (`--max-running`), its key in the ini file (`max-running` in its
section), its environment variable (`LEVSERVE_MAX_RUNNING`), its help text and its row in the documentation's
table. `parse.py` reads the values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from levserve.settings.kind import (
    COUNT_OR_AUTO,
    ENV_PREFIX,
    HOST_ID,
    KEY,
    NAME,
    NAMES,
    ORIGINS,
    PAIR,
    PATH,
    SEED,
    SWITCH,
    TEMPERATURE,
    TEXT,
    Setting,
    integer,
    milliseconds,
    one_of,
    seconds,
    setting,
    size,
)

FAULTS_VARIABLE = f"{ENV_PREFIX}FAULTS"  # for tests only (device/faults.py), so it is not a setting
KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"
OTHER_KEY_VARIABLE = "LEVANTER_API_KEY"  # what Levanter's own server reads
SECTIONS = {
    "server": "address, keys and connections",
    "model": "what to serve",
    "engine": "how to run on the device",
    "limits": "queues, sizes and timeouts",
    "log": "logs, metrics and traces",
}
MAX_HOSTS = 4096
OTHER_DTYPES = {"float16": "bfloat16", "half": "bfloat16", "float": "float32"}
"""float16 is as large as bfloat16, and models trained in bfloat16 overflow it."""
MODEL_SECTION = "model."
"""[model.NAME] describes one of several models. It may hold OWN_SETTINGS and SHARED_SETTINGS."""
TOOL_FORMATS = (
    "hermes",
    "qwen3-coder",
    "llama3-json",
    "pythonic",
    "mistral",
    "mistral-ids",
    "mistral-args",
    "phi4",
    "phi4-functools",
    "granite",
    "deepseek-v3",
    "deepseek-v3.1",
    "glm4",
    "olmo3",
    "harmony",
    "prompt",
)
OWN_SETTINGS = (
    "model",
    "hf_checkpoint",
    "checkpoint_path",
    "model_config",
    "revision",
    "adapter",
    "draft_model",
    "tokenizer",
    "chat_template",
    "reasoning",
    "tool_format",
    "hrm_heads",
    "hrm_cycles",
    "hrm_experts_per_token",
    "served_model_name",
)
"""Settings that a model's section never inherits."""
SHARED_SETTINGS = (
    "model_store",
    "dtype",
    "quantize",
    "max_seq_len",
    "max_new_tokens",
    "max_new_tokens_mode",
    "truncate_prompts",
    "load",
    "kv_dtype",
    "kv_memory",
    "kv_pages",
    "kernels",
    "tensor_parallel",
)
"""Settings that a model's section takes from the other sections unless it sets them itself."""


class ShownSetting(NamedTuple):
    """The value of one setting as logs show it, with secrets masked."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator asked for. `parse_settings` makes and checks it; a test may make its own.

    `models` has the settings of each [model.NAME] section, by the name that requests use. `sources` says
    where the values that are not defaults came from. `file_keys` and `admin_file_keys` are what the key files
    contain. `notes` are lines for the log, for example about other servers' names that were used.
    """

    host: str = setting("server", NAME, "127.0.0.1", "Address to listen on.")
    port: int = setting("server", integer(0, 65535), 8000, "Port to listen on; 0 lets the system choose one.")
    api_key: str = setting(
        "server",
        KEY,
        "",
        f"Bearer key that clients must send; empty: ${OTHER_KEY_VARIABLE}, or else no key is needed.",
        secret=True,
    )
    api_key_file: str = setting(
        "server", PATH, "", "File of additional accepted keys, one per line; # starts a comment."
    )
    admin_key: str = setting(
        "server", KEY, "", "Bearer key for the /admin endpoints, which are off without one.", secret=True
    )
    admin_key_file: str = setting(
        "server", PATH, "", "File of additional admin keys, one per line; # starts a comment."
    )
    open_metrics: bool = setting("server", SWITCH, False, "Serve /metrics and /metrics/router without a key.")
    ui: bool = setting(
        "server", SWITCH, True, "Serve a page for browsers at /, with its files under /static."
    )
    cors_origins: tuple[str, ...] = setting(
        "server", ORIGINS, (), "Origins whose web pages may call the server; * allows all, empty allows none."
    )
    cors_credentials: bool = setting(
        "server",
        SWITCH,
        False,
        "Let pages of --cors-origins send cookies and other credentials of their users; not with *.",
    )
    drain_seconds: float = setting(
        "server", seconds(0), 30.0, "Seconds that running requests have to finish after SIGTERM."
    )
    keep_alive: float = setting(
        "server",
        seconds(0),
        75.0,
        "Seconds an idle connection stays open; must be longer than a proxy's (nginx: 60).",
    )
    sse_heartbeat: float = setting(
        "server",
        seconds(0),
        15.0,
        "Seconds between comment lines that keep an idle stream open; 0: send none.",
    )

    state_dir: str = setting(
        "server",
        PATH,
        "",
        "Folder for what should outlive a restart, such as stored responses, files and batches; empty: "
        "responses are in memory only, and the others in a temporary folder.",
    )

    model: str = setting(
        "model",
        NAME,
        "smollm2-135m",
        "Model to serve: the bundled model's name, a Hugging Face folder, a .gguf file, an AI-OS brain, "
        "org/name, org/name@revision, org/name:Q4_K_M or org/name/FILE.gguf on the Hub, or a gs://, s3:// or "
        "http(s):// address.",
    )
    hf_checkpoint: str = setting("model", PATH, "", "Another name for --model; give only one of the two.")
    checkpoint_path: str = setting(
        "model", PATH, "", "Levanter checkpoint, or a folder of them (newest is used), instead of --model."
    )
    model_config: str = setting(
        "model",
        PATH,
        "",
        "config.yaml of the Levanter run; empty: look in the checkpoint and up to two folders above it.",
    )
    model_store: str = setting(
        "model", PATH, "", "Folder or address where --model names are looked up; org/name is org-name there."
    )
    revision: str = setting("model", TEXT, "", "Branch, tag or commit on the Hub; empty: the main branch.")
    adapter: str = setting(
        "model",
        PATH,
        "",
        "PEFT LoRA adapter to add to the model's weights: a folder, or a name on the Hub.",
    )
    draft_model: str = setting(
        "model",
        PATH,
        "",
        "Smaller model with the same tokenizer, given as for --model, that drafts tokens for the model to "
        "verify, where that is faster; empty: none.",
    )
    tokenizer: str = setting(
        "model", PATH, "", "Folder, .gguf file or Hub name of a tokenizer to use instead of the model's own."
    )
    chat_template: str = setting(
        "model", PATH, "", "Jinja file to use instead of the model's own chat template."
    )
    reasoning: str = setting(
        "model",
        one_of("auto", "none", "think", "mistral", "gemma", "harmony"),
        "auto",
        "How the model marks its thoughts. auto: as its chat template shows; none: not at all; others: as a "
        "family of models does (think: <think>...</think>).",
    )
    tool_format: str = setting(
        "model",
        one_of("auto", *TOOL_FORMATS),
        "auto",
        "How the model writes calls of tools. auto: as its chat template shows; others: as a family of "
        "models does.",
    )
    served_model_name: tuple[str, ...] = setting(
        "model",
        NAMES,
        (),
        "Names of the model in /v1/models and in requests, the main one first; empty: the model's own name.",
    )
    dtype: str = setting(
        "model",
        one_of("auto", "float32", "bfloat16", synonyms=OTHER_DTYPES),
        "auto",
        "Number format to compute in; auto: bfloat16, or float32 for an HRM brain.",
    )
    quantize: str = setting(
        "model",
        one_of("auto", "none", "int8", "int8-blocks", "int4", "int4-blocks", "fp8", "keep"),
        "auto",
        "Format of the weight matrices. none: that of --dtype. int8: eight bits, a scale for each row. "
        "int8-blocks (CPUs): a scale for every 32 inputs, which is more exact and slower. int4-blocks "
        "(CPUs): the same, but four-bit matrices of the checkpoint stay in four bits. int4 (CPUs with AMX): "
        "likewise, but multiplied in bfloat16. fp8 (GPUs): eight-bit floats, activations too. "
        "keep: as a quantized checkpoint has them. auto: for a quantized checkpoint keep on a GPU; on a CPU, "
        "if --dtype is auto, int8, or with AMX int4 if most matrices have four bits; for others none.",
    )
    max_seq_len: int = setting(
        "model",
        integer(0),
        0,
        "Maximum tokens in prompt and answer together; 0: the model's limit, or what memory allows.",
    )
    hrm_heads: int = setting(
        "model", integer(0), 0, "Attention heads of an HRM brain; 0: as its brain.json says, or else 8."
    )
    hrm_cycles: tuple[int, int] | None = setting(
        "model",
        PAIR,
        None,
        "High and low cycles of an HRM brain; empty: as its brain.json says, or 2,2.",
    )
    hrm_experts_per_token: int = setting(
        "model", integer(0), 0, "Experts per token of an HRM brain; 0: as its brain.json says, or else 2."
    )
    default_max_tokens: int = setting(
        "model",
        integer(0),
        0,
        "max_tokens of requests that set none; 0: OpenAI's, 16 for completions, all that fit for chats.",
    )
    default_temperature: float | None = setting(
        "model", TEMPERATURE, None, "Temperature of requests that set none; empty: 1, as OpenAI does."
    )
    models_dir: str = setting("model", PATH, "", "Folder or address; requests may name any model in it.")
    load: str = setting(
        "model",
        one_of("first-use", "start"),
        "first-use",
        "When to load each of several models; the default one is loaded at the start, unless --lazy.",
    )
    lazy: bool = setting("model", SWITCH, False, "Load no model at the start, but each at its first request.")
    cache_dir: str = setting(
        "model",
        PATH,
        "",
        "Folder for downloads and compiled programs; empty: $XDG_CACHE_HOME/levserve or ~/.cache/levserve.",
    )
    cache_size: int = setting(
        "model", size(0), 0, "Maximum disk space in the cache for models fetched from stores; 0: no limit."
    )
    weight_cache: int = setting(
        "model",
        size(0),
        32 << 30,
        "Maximum disk space for weights prepared for a CPU, which make later starts fast; 0: keep none.",
    )

    device: str = setting(
        "engine",
        one_of("auto", "cpu", "gpu", "rocm", "tpu", synonyms={"cuda": "gpu"}),
        "auto",
        "Kind of device to run on; gpu is NVIDIA's, rocm is AMD's and untested.",
    )
    tensor_parallel: int = setting(
        "engine",
        COUNT_OR_AUTO,
        1,
        "Number of devices that share the model, each with a part of every layer; auto: as many as possible.",
    )
    threads: int = setting(
        "engine",
        integer(0, 1024),
        0,
        "CPU threads that compute; 0: $PJRT_NPROC, or else as many CPUs as the process or its container has.",
    )
    max_running: int = setting(
        "engine", integer(0), 0, "Maximum number of requests decoded together; 0: chosen for the machine."
    )
    page_size: int = setting(
        "engine", one_of(4, 8, 16, 32, 64, 128, 256), 32, "Tokens in one page of the KV cache."
    )
    kv_dtype: str = setting(
        "engine",
        one_of("auto", "bfloat16", "fp8", "int8"),
        "auto",
        "Number format of the KV cache; auto: that of --dtype; fp8 and int8 (CPUs) hold twice the tokens.",
    )
    kv_memory: int = setting("engine", size(0), 0, "Memory for the KV cache; 0: chosen for the machine.")
    kv_pages: int = setting(
        "engine", integer(0), 0, "Pages of the KV cache, instead of --kv-memory; 0: chosen for the machine."
    )
    models_memory: int = setting(
        "engine",
        size(0),
        0,
        "Maximum memory of all loaded models, weights and KV; 0: 9/10 of the free memory.",
    )
    max_loaded_models: int = setting(
        "engine", integer(0), 0, "Maximum number of models loaded at once; 0: as many as memory allows."
    )
    round_steps: int = setting(
        "engine", integer(0), 0, "Decode steps per device round; 0: 1 on CPU, 8 on accelerators."
    )
    speculate: int = setting(
        "engine",
        integer(0, 15),
        0,
        "Tokens to draft and verify in one step, where that is faster, from the text so far or from "
        "--draft-model; 0: no drafts, or 4 at a time if there is a draft model.",
    )
    prefill_chunk: int = setting(
        "engine", integer(0), 0, "Maximum prompt tokens per device call; 0: 128 on CPU, 4096 on accelerators."
    )
    inter_token_goal_ms: float = setting(
        "engine",
        milliseconds(1),
        100.0,
        "Milliseconds that prompts of other requests may delay a running stream in each round.",
    )
    seed: int | None = setting(
        "engine",
        SEED,
        None,
        "Makes requests without a seed repeatable, in order of arrival; empty: each gets a random seed.",
    )
    kernels: str = setting(
        "engine",
        one_of("auto", "xla"),
        "auto",
        "auto: levserve's own CPU or GPU kernels where they support the model; xla: only what XLA compiles.",
    )
    compile_cache: bool = setting(
        "engine", SWITCH, True, "Keep compiled programs on disk for the next start."
    )
    num_hosts: int = setting(
        "engine", integer(1, MAX_HOSTS), 1, "Hosts that serve one model together, one process on each."
    )
    host_id: int | None = setting(
        "engine", HOST_ID, None, "Number of this host, from 0; host 0 answers HTTP and schedules."
    )
    coordinator: str = setting(
        "engine",
        TEXT,
        "",
        "host:port of host 0, where the hosts meet; the next port is used too; auto: this, --num-hosts and "
        "--host-id come from the variables of LeaderWorkerSet, SLURM or a TPU pod; empty: there is one host.",
    )
    hosts_timeout: float = setting(
        "engine", seconds(1), 300.0, "Seconds that hosts wait for each other at the start."
    )

    max_waiting: int = setting(
        "limits", integer(0), 0, "Maximum number of waiting requests; 0: four times --max-running."
    )
    max_inflight_tokens: int = setting(
        "limits",
        integer(0),
        0,
        "Maximum number of tokens (prompt and max_tokens) of all running and waiting requests; "
        "0: chosen from the KV cache and the queue.",
    )
    max_body_bytes: int = setting(
        "limits", size(1), 4 * 2**20, "Maximum size of a request body or WebSocket message."
    )
    max_new_tokens: int = setting(
        "limits", integer(0), 0, "Maximum tokens to generate for one choice; 0: as many as the context holds."
    )
    max_new_tokens_mode: str = setting(
        "limits",
        one_of("cap", "refuse"),
        "cap",
        "What happens to requests for more than --max-new-tokens: cap them and say so in the answer's "
        "warnings, or refuse them with a 400.",
    )
    truncate_prompts: bool = setting(
        "limits",
        SWITCH,
        False,
        "Cut the beginning off prompts that do not fit the context, and say so in the answer's warnings, "
        "instead of refusing them.",
    )
    max_sockets: int = setting(
        "limits", integer(0), 16, "Maximum number of open WebSockets; each occupies a thread."
    )
    max_stored_responses: int = setting(
        "limits",
        integer(0),
        1000,
        "Maximum number of responses kept for previous_response_id; the oldest are dropped first; "
        "0: keep none.",
    )
    stored_responses_memory: int = setting(
        "limits", size(0), 64 * 2**20, "Maximum size of all stored responses, in memory and in --state-dir."
    )
    max_file_bytes: int = setting("limits", size(1), 200 * 2**20, "Maximum size of a file for /v1/files.")
    files_disk: int = setting(
        "limits",
        size(0),
        10 * 2**30,
        "Maximum size of all files of /v1/files together, in --state-dir. Results of batches count, but are "
        "kept in any case.",
    )
    max_batch_requests: int = setting(
        "limits", integer(1), 50_000, "Maximum number of requests in one batch of /v1/batches."
    )
    request_timeout: float = setting("limits", seconds(0), 600.0, "Seconds a request may take; 0: no limit.")
    header_timeout: float = setting(
        "limits", seconds(0.1), 10.0, "Seconds a client has to send the headers of a request."
    )
    body_timeout: float = setting(
        "limits", seconds(0.1), 30.0, "Seconds a client has to send the body after the headers."
    )
    send_timeout: float = setting(
        "limits",
        seconds(0.1),
        30.0,
        "Seconds before a client that reads nothing of its answer is disconnected.",
    )
    stall_seconds: float = setting(
        "limits",
        seconds(0),
        30.0,
        "Seconds without progress before a device that has work counts as stalled; 0: never.",
    )

    log_level: str = setting(
        "log", one_of("debug", "info", "warning", "error"), "info", "Lowest severity that is logged."
    )
    log_format: str = setting(
        "log", one_of("text", "json"), "text", "Log lines for people, or one JSON object per line."
    )
    logging_config: str = setting(
        "log",
        PATH,
        "",
        "Python logging file instead of --log-format: YAML or JSON for dictConfig, ini for fileConfig.",
    )
    access_log: bool = setting("log", SWITCH, True, "Log a line for each request.")
    vllm_metrics: bool = setting(
        "log", SWITCH, False, "Also export metrics under vLLM's names, for dashboards made for vLLM."
    )
    tracing: str = setting(
        "log", one_of("off", "otlp", "console"), "off", "Where OpenTelemetry spans go; OTEL_ variables apply."
    )

    models: Mapping[str, Settings] = field(default_factory=dict)
    most_devices: int = 1
    """The largest number of devices that any of several models is shared by."""
    dry_run: bool = False
    faults: str = ""
    notes: tuple[str, ...] = field(default=(), compare=False)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    file_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_file_keys: tuple[str, ...] = field(default=(), repr=False)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Every accepted key; without one, anyone may call."""
        return (self.api_key, *self.file_keys) if self.api_key else self.file_keys

    @property
    def admin_keys(self) -> tuple[str, ...]:
        """Every key for /admin; without one, /admin is off."""
        return (self.admin_key, *self.admin_file_keys) if self.admin_key else self.admin_file_keys

    @property
    def main_name(self) -> str:
        """The first of the names that the model is served under; empty if none is set."""
        return self.served_model_name[0] if self.served_model_name else ""

    @property
    def has_several(self) -> bool:
        """Whether requests may choose between models."""
        return bool(self.models or self.models_dir)

    def for_model(self, name: str, **own: Any) -> Settings:
        """The settings of one of several models: `own` on top of what all models share."""
        fresh = {s.name: s.default for s in SETTINGS if s.name in OWN_SETTINGS}
        names = {"served_model_name": (name,)}
        return replace(self, **{**fresh, **names, **own, "models": {}, "models_dir": ""})

    @property
    def cache_path(self) -> Path:
        if self.cache_dir:
            return Path(self.cache_dir)
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():  # unset, or relative, which the XDG specification says to ignore
            base = Path.home() / ".cache"
        return base / "levserve"

    def describe(self) -> list[ShownSetting]:
        """Every setting in order of declaration.

        The source is "default", "command line", "environment VARIABLE" or "file PATH".
        """
        shown = []
        for s in SETTINGS:
            value = s.show(getattr(self, s.name))
            shown.append(ShownSetting(s.name, value, self.sources.get(s.name, "default")))
        return shown


SETTINGS = tuple(Setting(f.name, f.default, **f.metadata) for f in fields(Settings) if f.metadata)
BY_KEY = {s.key: s for s in SETTINGS}
BY_NAME = {s.name: s for s in SETTINGS}


def settings_of(section: str) -> list[Setting]:
    return [s for s in SETTINGS if s.section == section]
