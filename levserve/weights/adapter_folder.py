"""A LoRA adapter as PEFT saves it: a folder with adapter_config.json and tensors. Imports no jax.

An adapter is served merged: `adapter_tensors.py` adds it to the weights while they are read, so the model is
as fast as without it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from levserve.errors import ConfigError, StartupError, cause_of
from levserve.weights.config_fields import Fields
from levserve.weights.hub import has_weights

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
SUPPORTED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    # Others, such as pissa and loftq, also change the base model's weights, which are not in the file.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""The supported values of each field; others need computations that levserve does not implement."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """How the tensors of an adapter are added to the matrices of its base model."""

    source: str
    rank: int
    alpha: float
    has_root_scale: bool
    """Whether the scale is alpha / sqrt(rank), as in rank-stabilized LoRA, instead of alpha / rank."""
    ranks: Mapping[str, object]
    alphas: Mapping[str, object]
    """`ranks` and `alphas` replace `rank` and `alpha` for modules whose names match a pattern."""
    base: str
    base_revision: str

    def rank_of(self, module: str) -> int:
        value = _find_pattern(self.ranks, module, self.rank)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StartupError(f"{self.source}: rank_pattern has {value!r} for {module}, not a rank")
        return value

    def scale_of(self, module: str) -> float:
        alpha = _find_pattern(self.alphas, module, self.alpha)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise StartupError(f"{self.source}: alpha_pattern has {alpha!r} for {module}, not a number")
        rank = self.rank_of(module)
        return float(alpha) / (math.sqrt(rank) if self.has_root_scale else rank)


def is_adapter(path: Path) -> bool:
    """Whether a folder is an adapter. Some have their base model's config.json, but never its weights."""
    if not (path / CONFIG_FILE).is_file():
        return False
    return not any(has_weights([file.name]) and file.name not in WEIGHT_FILES for file in path.iterdir())


def adapter_problem(path: Path) -> str | None:
    """Why a path is not an adapter, as the end of a sentence that starts with it."""
    if not path.exists():
        return "does not exist"
    if not (path / CONFIG_FILE).is_file():
        return f"is not a PEFT adapter: expected a folder with {CONFIG_FILE}"
    if not any((path / name).is_file() for name in WEIGHT_FILES):
        return f"has none of {', '.join(WEIGHT_FILES)}"
    return None


def weight_file(folder: Path) -> Path:
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"adapter {folder} {adapter_problem(folder)}")


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises `StartupError`, which names the field, for an adapter that cannot be served."""
    path = folder / CONFIG_FILE
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {cause_of(error)}") from error
    if not isinstance(values, dict):
        raise StartupError(f"cannot read {path}: expected an object")
    fields = Fields(str(path), values)
    if not fields.has("peft_type"):
        raise fields.wrong("peft_type", "'LORA'")
    fields.require(SUPPORTED)
    base, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    return AdapterConfig(
        source=str(path),
        rank=fields.integer("r", 8),
        alpha=fields.number("lora_alpha", 8),
        has_root_scale=fields.flag("use_rslora", False),
        ranks=_read_patterns(fields, "rank_pattern"),
        alphas=_read_patterns(fields, "alpha_pattern"),
        base=base if isinstance(base, str) else "",
        base_revision=revision if isinstance(revision, str) else "",
    )


def _read_patterns(fields: Fields, name: str) -> Mapping[str, object]:
    patterns = fields.mapping(name).values
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error:
            raise fields.wrong(name, "regular expressions with a value each") from None
    return patterns


def _find_pattern(patterns: Mapping[str, object], module: str, default: object) -> object:
    """The value of the first pattern that matches the module's name or its end after a dot, as in PEFT."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
