"""Finds lm-evaluation-harness, which is too large to install for every test run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.node import NotAvailable


def find_harness() -> Path:
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        raise NotAvailable("lm-eval is not installed (pip install 'levserve[eval]')")
    return Path(found.origin)
