"""The golden brains: folders as users of AI-OS have them, and the results of AI-OS's own model."""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.conftest import GOLDEN
from tests.engines import cache_folder

BRAINS = ("hrm-tiny-moe", "hrm-tiny-dense-pt", "hrm-tiny-odd", "hrm-tiny-bare-fp16", "hrm-tiny-trained")
WIDE = "hrm-wide-recipe"


@functools.cache
def brain_folder(name: str) -> Path:
    """The folder of a golden brain; the weights of the wide one are made on first use."""
    if name != WIDE:
        return GOLDEN / name
    folder = Path(tempfile.mkdtemp(dir=cache_folder())) / name
    shutil.copytree(GOLDEN / name, folder)
    recipe = importlib.util.spec_from_file_location("make_weights", folder / "make_weights.py")
    assert recipe is not None and recipe.loader is not None
    module = importlib.util.module_from_spec(recipe)
    recipe.loader.exec_module(module)
    module.write(folder / "actv1_student.safetensors")
    return folder


def brain_cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((GOLDEN / name / "golden.json").read_text())["cases"]
    return cases
