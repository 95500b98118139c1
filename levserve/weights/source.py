"""Finds the files of the model to serve, wherever the settings say that it is.

That may be the bundled model, a folder, a GGUF file, a repository on the Hub, a store or a Levanter run.
`check_source` is called before the fork and only looks at names; `find_source` is called when the model is
loaded and may download. Imports no jax.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath

from levserve.errors import ConfigError, StartupError
from levserve.gguf import parts
from levserve.settings.settings import Settings
from levserve.weights.adapter_folder import adapter_problem, is_adapter, read_adapter_config
from levserve.weights.brain_folder import DESCRIPTION, SUFFIXES, find_brain, find_brain_tokenizer, is_brain
from levserve.weights.brain_store import fetch_brain
from levserve.weights.bundled import SMOLLM2, find_bundled
from levserve.weights.fetch import fetch_files
from levserve.weights.hub import fetch_repo, has_weights, list_repo, needed_files
from levserve.weights.hub_gguf import HubName, fetch_gguf, has_gguf, parse_hub_name
from levserve.weights.levanter_folder import METADATA_FILE
from levserve.weights.model_files import ModelFiles, find_tokenizer
from levserve.weights.progress import Report
from levserve.weights.store import Store, check_address, is_address

WEIGHTS = "*.safetensors or pytorch_model*.bin"
ACCEPTED = (
    f"{SMOLLM2.name}, a folder with config.json and {WEIGHTS}, a .gguf file, a LoRA adapter, an AI-OS brain, "
    "an org/name, org/name:Q4_K_M or org/name/FILE.gguf on the Hugging Face Hub, "
    "or a gs://, s3:// or http(s):// address of such a folder or file"
)
CHECKPOINT_FILES = ("metadata.json", "*/metadata.json")  # a Levanter checkpoint, and a run of them
# The files to ask a web server for, because it cannot list them.
KNOWN_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja")
SHARD = re.compile(r'"([\w.-]+\.(?:safetensors|bin))"')


def check_source(settings: Settings) -> None:
    """Refuses what can be seen to be wrong without reading weights or using the network."""
    path = settings.checkpoint_path
    if not path:
        check_model(stored_name(settings.model, settings.model_store))
    elif is_address(path):
        check_address(path)
    elif not Path(path).is_dir():
        raise ConfigError(f"--checkpoint-path {path!r} is not a folder with one or more Levanter checkpoints")
    if settings.adapter:
        _check_adapter(settings)
    if settings.draft_model:
        try:
            check_source(draft_settings(settings))
        except StartupError as error:
            raise ConfigError(f"--draft-model: {error}") from None


def find_source(settings: Settings, report: Report, *, with_tokenizer: bool = True) -> ModelFiles:
    """The files of the model that the settings name, downloaded if necessary."""
    address = stored_name(settings.model, settings.model_store)
    if not settings.checkpoint_path and _is_stored_run(address):
        settings = replace(settings, checkpoint_path=address)
    if settings.checkpoint_path:
        from levserve.weights.levanter_run import find_run  # imports jax: only after the fork

        files = find_run(settings, report, with_tokenizer=with_tokenizer and not settings.tokenizer)
    else:
        files = find_model(
            address,
            revision=settings.revision,
            cache_path=settings.cache_path,
            report=report,
            limit_bytes=settings.cache_size,
        )
        if address != settings.model:
            files = ModelFiles(settings.model, files.path, lease=files.lease)
        files = _with_adapter(files, settings, report)
    if not with_tokenizer:
        return files
    if not settings.tokenizer:
        if files.adapter is not None and any((files.adapter / name).is_file() for name in TOKENIZER_FILES):
            report(
                "the tokenizer and the chat template are the base model's; --tokenizer and --chat-template "
                "take the adapter's"
            )
        return files if not is_brain(files.path) else _with_brain_tokenizer(files)
    tokenizer, lease = find_tokenizer(settings.tokenizer, settings, report)
    return replace(files, tokenizer=tokenizer, tokenizer_lease=lease)


def _with_adapter(files: ModelFiles, settings: Settings, report: Report) -> ModelFiles:
    """The base model's files with the adapter, if the model is one; else `files`, with --adapter if given."""
    if not is_adapter(files.path):
        if not settings.adapter:
            return files
        return replace(files, adapter=_find_adapter(settings, report))
    config = read_adapter_config(files.path)
    if settings.adapter:
        raise ConfigError(f"--model {settings.model} is an adapter itself, so --adapter cannot be given too")
    hint = f"name its base model: --model BASE --adapter {settings.model}"
    if not config.base:
        raise StartupError(f"{config.source}: base_model_name_or_path is missing; {hint}")
    beside = files.path / config.base
    base = str(beside) if config.base.startswith(".") and beside.is_dir() else config.base
    if base == settings.model or is_adapter(Path(base)):
        raise StartupError(
            f"{config.source}: base_model_name_or_path = {base!r} is an adapter as well; {hint}"
        )
    own = replace(settings, model=base, revision=config.base_revision, tokenizer="", draft_model="")
    try:
        found = find_source(own, report, with_tokenizer=False)
    except StartupError as error:
        raise StartupError(
            f"{config.source}: base_model_name_or_path = {config.base!r}: {error}; {hint}"
        ) from error
    return replace(found, name=files.name, adapter=files.path)


def _find_adapter(settings: Settings, report: Report) -> Path:
    path = Path(settings.adapter).expanduser()
    if path.exists():
        return path
    folder = fetch_repo(settings.adapter, revision="", cache_path=settings.cache_path / "hub", report=report)
    if problem := adapter_problem(folder):
        raise StartupError(f"--adapter {settings.adapter} on the Hugging Face Hub {problem}")
    return folder


def _check_adapter(settings: Settings) -> None:
    path = Path(settings.adapter).expanduser()
    if settings.checkpoint_path:
        raise ConfigError("--adapter is for Hugging Face models, and --checkpoint-path names a Levanter run")
    name = parse_hub_name(settings.adapter)
    if not path.exists() and name is not None and name.repo == settings.adapter:
        return
    if problem := adapter_problem(path):
        raise ConfigError(f"--adapter {settings.adapter} {problem}")


def find_with_draft(settings: Settings, report: Report) -> ModelFiles:
    """Does the same as `find_source`, and finds the files of the draft model, if there is one."""
    files = find_source(settings, report)
    if not settings.draft_model:
        return files
    draft = find_source(draft_settings(settings), report)
    if is_brain(draft.path):
        raise ConfigError(
            f"--draft-model {settings.draft_model}: an HRM brain cannot draft, it has no KV cache"
        )
    return replace(files, draft=draft)


def draft_settings(settings: Settings) -> Settings:
    """The settings with the draft model in place of the model."""
    name, revision = settings.draft_model, ""
    if not Path(name).expanduser().exists() and not is_address(name):
        name, _, revision = name.partition("@")
    return replace(
        settings,
        model=name,
        revision=revision,
        checkpoint_path=name if has_checkpoints(Path(name).expanduser()) else "",
        adapter="",
        model_config="",
        tokenizer="",
        draft_model="",
    )


def has_checkpoints(folder: Path) -> bool:
    """Whether a folder is a Levanter checkpoint, or a run of them."""
    return any(next(folder.glob(pattern), None) for pattern in CHECKPOINT_FILES)


def stored_name(model: str, store: str) -> str:
    """Where the store, if there is one, keeps the model of this name: org/name is in the folder org-name."""
    if not store or model == SMOLLM2.name or is_address(model) or Path(model).expanduser().exists():
        return model
    name = parse_hub_name(model)
    folder, file = (name.repo, f"/{name.file}") if name is not None and name.file else (model, "")
    return f"{store.rstrip('/')}/{folder.replace('/', '-')}{file}"


def _is_stored_run(address: str) -> bool:
    """Whether a model's address is that of a Levanter run or of one of its checkpoints."""
    if not is_address(address) or address.endswith((parts.SUFFIX, *SUFFIXES)):
        return False
    store = Store(address)
    if store.describe("config.json") is not None:
        return False
    names = store.list_entries()
    return METADATA_FILE in names or any(
        is_folder and store.describe(f"{name}/{METADATA_FILE}") is not None
        for name, is_folder in names.items()
    )


def check_model(model: str) -> None:
    """Refuses a value of --model that `check_source` refuses."""
    if is_address(model):
        check_address(model)
        return
    path = Path(model).expanduser()
    if model == SMOLLM2.name or (not path.exists() and _hub_name(model) is not None):
        return
    try:
        problem = local_problem(path)
        hint = _nearby_model(path) if problem and path.is_dir() else None
    except OSError as error:
        raise ConfigError(f"--model {model}: cannot read {error.filename}: {error.strerror}") from None
    if problem:
        raise ConfigError(f"model {model!r} {problem}; {hint or f'expected {ACCEPTED}'}")


def find_model(
    model: str, *, revision: str, cache_path: Path, report: Report, limit_bytes: int = 0
) -> ModelFiles:
    """The model's files, downloaded into `cache_path` if they are not on disk."""
    check_model(model)
    if model == SMOLLM2.name:
        return ModelFiles(model, find_bundled(cache_path, report))
    if is_address(model):
        return _fetch_model(model, cache_path, limit_bytes, report)
    path = Path(model).expanduser()
    if is_brain(path):
        brain = find_brain(path)
        return ModelFiles(brain.folder.resolve().name, brain.weights)
    if path.is_file():
        return ModelFiles(parts.model_name(path.name), path)
    if path.is_dir():
        return ModelFiles(path.resolve().name, path)
    name = _hub_name(model)
    assert name is not None  # check_model refuses other names
    try:
        return ModelFiles(model, _fetch_from_hub(name, revision, cache_path / "hub", report))
    except StartupError as error:
        if not path.parent.is_dir():
            raise
        raise StartupError(f"{error}; and the folder {path.parent} here has no {path.name}") from error


def _fetch_from_hub(name: HubName, revision: str, cache_path: Path, report: Report) -> Path:
    if name.file or name.tag:
        return fetch_gguf(name, revision=revision, cache_path=cache_path, report=report)
    folder = fetch_repo(name.repo, revision=revision, cache_path=cache_path, report=report)
    problem = local_problem(folder)
    if problem is None:
        return find_brain(folder).weights if is_brain(folder) else folder
    if has_gguf(list_repo(name.repo, revision=revision, cache_path=cache_path)):
        return fetch_gguf(name, revision=revision, cache_path=cache_path, report=report)
    raise StartupError(f"model {name.repo!r} on the Hugging Face Hub {problem}, and has no GGUF file")


def _fetch_model(address: str, cache_path: Path, limit_bytes: int, report: Report) -> ModelFiles:
    store = Store(address)
    name = PurePosixPath(store.address).name
    if name.endswith(parts.SUFFIX):
        return _fetch_gguf(store, name, cache_path, limit_bytes, report)
    if name.endswith(SUFFIXES):
        folder = Store(store.address.removesuffix(f"/{name}"))
        return fetch_brain(folder, cache_path, weights=name, limit_bytes=limit_bytes, report=report)
    found_files = store.describe_all(_model_files(store))
    needed = needed_files([file.name for file in found_files])
    files = [file for file in found_files if file.name in needed]
    names = sorted(needed)
    if "config.json" not in names and store.describe(DESCRIPTION) is not None:
        return fetch_brain(store, cache_path, limit_bytes=limit_bytes, report=report)
    if "config.json" not in names or not has_weights(names):
        found = f"found {', '.join(names[:8])}" if names else "found nothing"
        raise StartupError(f"model {store.shown}: expected config.json and {WEIGHTS}, {found}")
    lease = fetch_files(store, files, cache_path, limit_bytes=limit_bytes, report=report)
    return ModelFiles(name, lease.path, lease=lease)


def _fetch_gguf(store: Store, name: str, cache_path: Path, limit_bytes: int, report: Report) -> ModelFiles:
    names = parts.part_names(name)
    if len(names) == 1:
        names = [""]  # what the address itself names
    else:
        store = Store(store.address.removesuffix(f"/{name}"))
    files = []
    for each in names:
        file = store.describe(each)
        if file is None:
            raise StartupError(f"model {f'{store.shown}/{each}'.rstrip('/')} does not exist")
        files.append(file)
    lease = fetch_files(store, files, cache_path, limit_bytes=limit_bytes, report=report)
    return ModelFiles(parts.model_name(name), lease.path / name, lease=lease)


def _model_files(store: Store) -> list[str]:
    """The names of the files that serving needs from a Hugging Face folder in a store."""
    listed = needed_files(store.list_files())
    if listed or not store.address.startswith("http"):
        return listed
    shards: set[str] = set()
    for name in KNOWN_FILES:
        if name.endswith(".index.json"):
            shards.update(SHARD.findall((store.read(name) or b"").decode(errors="replace")))
    return sorted({*KNOWN_FILES, *shards})


def _hub_name(model: str) -> HubName | None:
    """The Hub name of a model that is not on disk; None for a missing file of a folder that exists."""
    name = parse_hub_name(model)
    is_missing_here = name is not None and name.file and Path(model).expanduser().parent.is_dir()
    return None if is_missing_here else name


def local_problem(path: Path) -> str | None:
    """Why a file or folder is not a model, as the end of a sentence that starts with its path."""
    if not path.exists():
        return "does not exist"
    if is_brain(path):
        return _brain_problem(path)
    if path.is_file():
        is_gguf = path.suffix == parts.SUFFIX
        return None if is_gguf else f"is a file of an unknown type ({path.suffix or 'no suffix'})"
    if is_adapter(path):
        return adapter_problem(path)
    if not (path / "config.json").is_file():
        return "is a folder without config.json"
    if not has_weights(file.name for file in path.iterdir()):
        return f"is a folder without {WEIGHTS}"
    return None


def _nearby_model(folder: Path) -> str | None:
    """What a folder that is no model holds instead, and how to serve it."""
    names = sorted(file.name for file in folder.iterdir())
    if files := [name for name in names if name.endswith(parts.SUFFIX)]:
        return f"it has {files[0]}: name that file, or serve all that are in the folder with --models-dir"
    if any(next(folder.glob(pattern), None) for pattern in CHECKPOINT_FILES):
        return "it looks like a Levanter run, which --checkpoint-path serves"
    if folders := [name for name in names if (folder / name / "config.json").is_file()]:
        return f"it has {folders[0]}/config.json: name that folder, or serve all of them with --models-dir"
    return None


def _brain_problem(path: Path) -> str | None:
    try:
        find_brain(path)
    except StartupError as error:
        return f"cannot be served: {error}"
    return None


def _with_brain_tokenizer(files: ModelFiles) -> ModelFiles:
    return replace(files, tokenizer=find_brain_tokenizer(find_brain(files.path)))
