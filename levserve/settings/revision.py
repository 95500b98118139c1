"""Splits org/name@revision into a name and a revision, for --model and for the model of a reload."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from levserve.errors import ConfigError
from levserve.settings.settings import Settings

REPO_AT_REVISION = re.compile(r"(\w[\w.-]*/\w[\w.-]*(?:[:/]\w[\w./+-]*)?)@(\S+)", re.ASCII)


def split_revision(settings: Settings) -> Settings:
    """Moves the revision of org/name@revision to its own setting."""
    found = REPO_AT_REVISION.fullmatch(settings.model)
    if found is None or os.path.exists(settings.model):
        return settings
    name, revision = found.groups()
    if settings.revision not in ("", revision):
        given = f"--revision {settings.revision} ({settings.sources['revision']})"
        raise ConfigError(
            f"--model {settings.model} ({settings.sources['model']}) names a different revision than {given}"
        )
    sources = {**settings.sources, "revision": settings.sources["model"]}
    return replace(settings, model=name, revision=revision, sources=sources)
