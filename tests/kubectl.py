"""Finds kubectl, whose kustomize needs no cluster, for the tests that use it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml

from tests.node import NotAvailable

MIN_MINOR = 27  # the first whose kustomize is 5


def find_kubectl() -> Path:
    found = shutil.which("kubectl")
    if found is None:
        raise NotAvailable("kubectl is not installed")
    output = subprocess.run(
        [found, "version", "--client", "-o", "yaml"], capture_output=True, text=True, check=True
    ).stdout
    version = yaml.safe_load(output)["clientVersion"]
    if int(version["minor"].rstrip("+")) < MIN_MINOR:
        raise NotAvailable(
            f"kubectl is {version['gitVersion']}, and 1.{MIN_MINOR} is the first that can be used"
        )
    return Path(found)
