"""How much shared memory a program may have on the GPU that it is traced for, and how many stages fit there.

Tilings are measured on an H200, whose programs may have 227 KiB. On other cards a program that needs more
than they have could not be compiled, so tilings are reduced; what a kernel needs is computed from its tile
sizes, with formulas that were compared with what Triton asks for on cards of each kind.
"""

from __future__ import annotations

import jax

from levserve.model.gpu.hopper import is_hopper

H200_BYTES = 227 << 10
SMALLEST_BYTES = 99 << 10
"""What programs may have on an L4, an A10 or an RTX 4090, the least of all GPUs that Triton compiles for."""
FEWEST_STAGES = 2
"""With a single stage nothing would be read ahead."""


def shared_memory() -> int:
    """Bytes that a program may have. Of a card that is not here only the name is known: if not a Hopper,
    it counts as the smallest. Where kernels are interpreted, without a card, tilings are an H200's."""
    named, here = jax.sharding.get_abstract_mesh().abstract_device, jax.devices()[0]
    if named is not None and named.device_kind != here.device_kind:
        return H200_BYTES if is_hopper() else SMALLEST_BYTES
    return int(getattr(here, "shared_memory_per_block_optin", H200_BYTES))


def has_measured_memory() -> bool:
    """Whether the card has as much as the one that tilings were measured on."""
    return shared_memory() >= H200_BYTES


def most_stages(num_stages: int, stage_bytes: int, other_bytes: int) -> int | None:
    """The most stages that fit, up to `num_stages`; None if not even `FEWEST_STAGES` do.

    `stage_bytes` are those of the tiles that one step reads. Cards with 227 KiB have tensor cores that still
    read the tiles of a step while the following ones arrive; others need memory for one step less.
    """
    spare = 0 if has_measured_memory() else 1
    for stages in range(num_stages, FEWEST_STAGES - 1, -1):
        if (stages - spare) * stage_bytes + other_bytes <= shared_memory():
            return stages
    return None
