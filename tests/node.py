"""Finds node and OpenAI's npm package for the tests that need them, or says why they are missing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGE = "openai@7"
INSTALL_SECONDS = 60


class NotAvailable(Exception):
    """Something that a test needs is missing here; the message says what and why."""


@functools.cache
def package_folder() -> Path:
    """A folder whose scripts can import the package; installed once and kept for later runs."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotAvailable("node and npm are not installed")
    folder = Path(tempfile.gettempdir()) / f"levserve-tests-{os.getuid()}" / f"npm-{PACKAGE}"
    if (folder / "node_modules" / "openai").exists():
        return folder
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, ignore_cleanup_errors=True
    ) as fresh:  # no run ever sees half of it
        command = [
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "--fetch-retries=0",
            "--prefix",
            fresh,
            PACKAGE,
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except subprocess.CalledProcessError as error:
            raise NotAvailable(
                f"npm cannot install {PACKAGE}: {' '.join(error.stderr.split())[:160]}"
            ) from None
        except subprocess.TimeoutExpired:
            raise NotAvailable(f"npm did not install {PACKAGE} in {INSTALL_SECONDS} seconds") from None
        try:
            Path(fresh).rename(folder)
        except OSError:  # another run was faster
            if not folder.exists():
                raise
    return folder
