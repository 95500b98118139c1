"""Which GPUs have Hopper's tensor cores, with instructions that no other generation has."""

from __future__ import annotations

import jax

HOPPER = "H100", "H200", "H800", "H20", "GH200"


def is_hopper() -> bool:
    """Whether programs are traced for such a GPU."""
    given = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if given is None else given.device_kind
    return any(name in kind.split() for name in HOPPER)
