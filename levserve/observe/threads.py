"""Names of the threads that compile beside the device thread; compiles elsewhere made a request wait."""

from __future__ import annotations

COMPILER_THREAD = "levserve-compile"
LOADER_THREAD = "levserve-loader"
