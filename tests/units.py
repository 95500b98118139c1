"""Finds the tool that checks systemd's unit files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.node import NotAvailable

MIN_VERSION = 250  # the first that judges a unit's exposure without a running systemd


def find_analyzer() -> Path:
    found = shutil.which("systemd-analyze")
    if found is None:
        raise NotAvailable("systemd-analyze is not installed")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.split()[
        1
    ]
    if int(version.partition(".")[0]) < MIN_VERSION:
        raise NotAvailable(
            f"systemd-analyze is {version}, and {MIN_VERSION} is the first that can judge a unit offline"
        )
    return Path(found)
