"""lm-evaluation-harness, which is too large an install for every run of the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.node import NotHad


def find_harness() -> Path:
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        raise NotHad("lm-eval is not installed (pip install 'levserve[eval]')")
    return Path(found.origin)
