"""Which GPUs have Hopper's tensor cores, with instructions that no other generation has, and how many."""

from __future__ import annotations

import jax

HOPPER = "H100", "H200", "H800", "H20", "GH200"
PROCESSORS = 132
"""Of an H200 and of most H100s; assumed where programs are compiled without the GPU."""


def is_hopper() -> bool:
    """Whether programs are traced for such a GPU."""
    given = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if given is None else given.device_kind
    return any(name in kind.split() for name in HOPPER)


def num_processors() -> int:
    """Streaming multiprocessors of the GPU that programs run on: an H100 for PCIe has 114, an H20 has 78."""
    found: int | None = getattr(jax.devices()[0], "core_count", None)
    return found or PROCESSORS
