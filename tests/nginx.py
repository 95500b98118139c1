"""Finds nginx for the tests that want it in front of the server."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.node import NotHad


def find_nginx() -> Path:
    """The program; raises `NotHad` where there is none. Debian keeps it where only root looks."""
    found = shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin")))
    if found is None:
        raise NotHad("there is no nginx here (Debian: apt-get install nginx-light)")
    return Path(found)
