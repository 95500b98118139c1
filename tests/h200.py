"""Compiles the server's programs for an NVIDIA H200 on a machine that has none.

That takes jax's CUDA plugin and nothing else of CUDA: `pip install --no-deps jax-cuda13-pjrt==V
jax-cuda13-plugin==V`, V being jax's own version (0.11.2 for instance); an ARM machine can do it too. The
result is what would run there, kernel by kernel and byte by byte, with one exception: with no card to try
tilings on, XLA takes its first guess at how to split each matrix product, so the result may contain a sum
over the parts of a product that is absent on a real card.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.node import NotAvailable

SPECIFICATION = Path(__file__).with_suffix(".txtpb")
PLUGIN = "jax_cuda13_plugin"
THUNK = re.compile(r"^( *)\d+: (k\w+) +\[[^]]*\] *(\w*)")
HOLDERS = {"kCommandBuffer", "kConditional", "kWhile"}
"""Thunks that only run others."""


def find_plugin() -> Path:
    found = importlib.util.find_spec(PLUGIN)
    if found is None or found.origin is None:
        jax = version("jax")
        raise NotAvailable(
            f"jax's CUDA plugin is not installed (pip install --no-deps jax-cuda13-pjrt=={jax} jax-cuda13-plugin=={jax})"
        )
    return Path(found.origin)


@dataclass(frozen=True)
class Thunk:
    """One step of what the card does: a kernel, a copy, or a graph, branch or loop with others in it."""

    depth: int
    kind: str
    name: str


def read_thunks(folder: Path) -> list[Thunk]:
    """Reads the thunk sequence that XLA dumped; thunks in a branch or loop follow it and are deeper."""
    (path,) = folder.glob("*.thunk_sequence_after_thunk_passes.txt")
    found = [THUNK.match(line) for line in path.read_text().splitlines()]
    return [Thunk(len(match[1]), match[2], match[3]) for match in found if match]


def inside(thunks: list[Thunk], index: int) -> list[Thunk]:
    """The thunks inside the one at `index`, at any depth."""
    rest = thunks[index + 1 :]
    end = next((at for at, thunk in enumerate(rest) if thunk.depth <= thunks[index].depth), len(rest))
    return rest[:end]
