"""Names of the threads that compile in the background. A compile on any other thread makes a request wait."""

from __future__ import annotations

COMPILER_THREAD = "levserve-compile"
LOADER_THREAD = "levserve-loader"
