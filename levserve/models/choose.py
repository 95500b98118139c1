"""Chooses the kind of a model by its files."""

from __future__ import annotations

from levserve.errors import ConfigError
from levserve.models.brain import describe_brain
from levserve.models.describe import describe as describe_decoder
from levserve.models.kind import AnyKind
from levserve.settings.settings import Settings
from levserve.weights.brain_folder import is_brain
from levserve.weights.model_files import ModelFiles


def describe(settings: Settings, files: ModelFiles) -> AnyKind:
    """Raises `ConfigError` for settings that the device or the model cannot serve."""
    if is_brain(files.path):
        if files.adapter is not None:
            raise ConfigError(f"--adapter {settings.adapter}: an HRM brain takes no adapter")
        return describe_brain(settings, files)
    for option, value in (
        ("--hrm-heads", settings.hrm_heads),
        ("--hrm-cycles", settings.hrm_cycles),
        ("--hrm-experts-per-token", settings.hrm_experts_per_token),
    ):
        if value:
            raise ConfigError(f"{option} is for HRM brains, and {files.name} is not one")
    return describe_decoder(settings, files)
