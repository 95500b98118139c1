"""`python -m levserve` is the command `levserve`."""

from __future__ import annotations

import sys

from levserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
